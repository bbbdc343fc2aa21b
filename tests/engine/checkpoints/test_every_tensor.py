"""FAULT 61 for every format: each tensor of a layer that is gone, of another shape or kind, or not
finite, and each header that lies, is an error by name before anything is made of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoints.quantized_weights import QuantizedWeights
from engine.checkpoints.safetensors import WeightReader
from engine.contract.errors import ModelLoadError
from engine.quantization.formats.registry import find_format
from tests.engine.checkpoints.folders import FILE
from tests.engine.checkpoints.test_formats import FORMATS as BY_TEST
from tests.engine.checkpoints.test_formats import Format
from tests.engine.checkpoints.writers import mxfp4

MODULE = "model.layers.0.mlp.down_proj"
SHAPE = (64, 128)
Change = Callable[[Tensor], Tensor | None]


def _experts(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Of gpt-oss: all experts of a layer in two tensors."""
    parts, full = mxfp4(weight[None])
    return {f"down_proj{name}": tensor for name, tensor in parts.items()}, full


FORMATS = {
    **BY_TEST,
    "mxfp4": Format({"quant_method": "mxfp4"}, _experts, "kept"),
}  # fmt: skip
#: What a checkpoint may lack: the layer's other tensors say what it would.
NOT_NEEDED = {"g_idx", "weight_format", "nbits", "group_size", "axis"}
#: What nothing reads.
UNUSED = {"input_scale"}


def gone(_: Tensor) -> None:
    return None


def shorter(tensor: Tensor) -> Tensor:
    return tensor[..., :-1].contiguous() if tensor.dim() else torch.zeros(0, dtype=tensor.dtype)


def longer(tensor: Tensor) -> Tensor:
    return torch.cat((tensor, tensor)) if tensor.dim() else tensor.expand(3).contiguous()


def of_another_kind(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.int32, torch.uint8, torch.int8) else (
        torch.zeros(tensor.shape, dtype=torch.int64)
    )  # fmt: skip


def not_finite(tensor: Tensor) -> Tensor:
    changed = tensor.float()
    changed.view(-1)[-1] = float("nan")
    return changed.to(tensor.dtype)


CHANGES = (gone, shorter, longer, of_another_kind, not_finite)


def applies(name: str, change: Change, tensor: Tensor) -> bool:
    """Whether a checkpoint can't have such a tensor."""
    if name in UNUSED:
        return False
    if change is gone:
        return name not in NOT_NEEDED
    if change is of_another_kind:
        return name != "_weight_zero_point"  # torchao has floats there, too
    if change is not_finite:
        # NaN among codes is a weight's own, which shows in what is computed with it.
        return tensor.is_floating_point() and name != "weight"
    return True


@pytest.fixture(scope="module")
def written() -> Callable[[str], dict[str, Tensor]]:
    written_tensors: dict[str, dict[str, Tensor]] = {}

    def get(name: str) -> dict[str, Tensor]:
        if name not in written_tensors:
            weight = torch.randn(*SHAPE, generator=torch.Generator().manual_seed(5))
            written_tensors[name] = FORMATS[name].write(weight)[0]
        return written_tensors[name]

    return get


def write_shard(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """A file of one layer."""
    words = {f"{MODULE}.{key}": word for key, word in FORMATS[name].header.items()}
    stored = {f"{MODULE}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
    save_file(stored, folder / FILE, metadata={"format": "pt", **words})


def refusal(folder: Path, name: str) -> ModelLoadError | None:
    """The error that a load begins with; None: it goes on. config.json asks for SHAPE."""
    form = find_format(FORMATS[name].config)
    assert form is not None
    try:
        weights = QuantizedWeights(WeightReader(folder), form)
        for module, _ in weights.packed():
            weights.matrix(f"{module}.weight", SHAPE)
    except ModelLoadError as error:
        return error
    return None


def changed(tensors: dict[str, Tensor], change: Change) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The layer with one tensor changed, for each of them."""
    for part, tensor in tensors.items():
        if applies(part, change, tensor):
            other = change(tensor)
            rest = {
                name: retained_tensor for name, retained_tensor in tensors.items() if name != part
            }
            yield part, rest if other is None else {**rest, part: other}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", FORMATS)
def test_fault_61_each_tensor_of_each_format(
    name: str, change: Change, written: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    write_shard(tmp_path, name, written(name))
    assert refusal(tmp_path, name) is None
    for part, tensors in changed(written(name), change):
        write_shard(tmp_path, name, tensors)
        error = refusal(tmp_path, name)
        assert error is not None, part
        assert error.param, part
        assert MODULE in error.message or "but no layer's are" in error.message, (
            part,
            error.message,
        )


@pytest.mark.parametrize("name", FORMATS)
def test_fault_61_each_header_that_lies(
    name: str, written: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    write_shard(tmp_path, name, written(name))
    content = (tmp_path / FILE).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    lies: list[dict[str, Any]] = [
        {"dtype": "Q4"}, {"shape": [1 << 40, 8]}, {"shape": [-1, 8]},
        {"data_offsets": [0, 1 << 60]}, {"data_offsets": [8, 0]},
    ]  # fmt: skip
    for part in written(name):
        for lie in lies:
            changed_header = {**header, f"{MODULE}.{part}": {**header[f"{MODULE}.{part}"], **lie}}
            token_ids = json.dumps(changed_header).encode()
            (tmp_path / FILE).write_bytes(
                len(token_ids).to_bytes(8, "little") + token_ids + content[end:]
            )
            error = refusal(tmp_path, name)
            assert error is not None, (part, lie)
            assert FILE in error.message, (part, lie, error.message)
            assert error.param
