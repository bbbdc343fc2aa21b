"""The tensors of a file are what safetensors reads, however they lie in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.contract.errors import InvalidRequest
from engine.lora.adapter import TensorFile

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _tensors(*dtypes: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{index}.{number}": torch.randn(5 + number, 3, generator=generator).to(dtype)
        for index, dtype in enumerate(dtypes)
        for number in range(4)
    }


def _moved(path: Path) -> None:
    """Its values begin at an odd address, as some writers have them."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.dumps(json.loads(raw[8 : 8 + length])).encode()
    header += b" " * (1 - len(header) % 2)
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


@pytest.mark.parametrize("dtypes", [_FLOATS[:1], _FLOATS[1:2], _FLOATS[2:], _FLOATS])
@pytest.mark.parametrize("odd", [False, True])
def test_tensors_are_what_was_written(
    dtypes: tuple[torch.dtype, ...], odd: bool, tmp_path: Path
) -> None:
    path, written = tmp_path / "tensors", _tensors(*dtypes)
    save_file(written, path, {"format": "pt"})
    if odd:
        _moved(path)
    with safe_open(str(path), framework="pt") as file:
        read = TensorFile(path, file)
        assert bool(read._views) == (len(dtypes) == 1 and not odd)
        for name, tensor in written.items():
            assert torch.equal(read.read(name), tensor)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtypes", [_FLOATS[:1], _FLOATS[1:2], _FLOATS[2:], _FLOATS])
def test_what_is_no_number_is_refused_by_name(
    value: float, dtypes: tuple[torch.dtype, ...], tmp_path: Path
) -> None:
    path, tensors = tmp_path / "tensors", _tensors(*dtypes)
    largest = torch.finfo(dtypes[0]).max
    tensors["0.0"][1, 1], tensors["0.1"][0, 0] = value, -largest
    save_file(tensors, path)
    with safe_open(str(path), framework="pt") as file:
        read = TensorFile(path, file)
        assert read.read("0.1")[0, 0] == -largest
        with pytest.raises(InvalidRequest, match=r"0\.0.* holds NaN or infinity"):
            read.read("0.0")
