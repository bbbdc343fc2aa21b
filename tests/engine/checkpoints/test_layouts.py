"""Layouts that few writers have, and blocks that a weight's edge cuts: one layer of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoints.quantized_weights import QuantizedWeights
from engine.contract.errors import ModelLoadError
from tests.engine.checkpoints.folders import FILE
from tests.engine.checkpoints.packages import compressed, scheme
from tests.engine.checkpoints.test_formats import opened
from tests.engine.checkpoints.writers import Written, nvfp4, packed_nvfp4

MODULE = "model.layers.0.mlp.down_proj"
ROWS, COLUMNS = 200, 352
#: Larger than the largest float of eight bits, so that clipping would show.
SPREAD = 1000.0
Layout = tuple[dict[str, Any], Callable[[Tensor], Written]]


def _float8(weight: Tensor, high: int, wide: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values, powers of two [blocks, blocks] as scales, and what both stand for."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
    largest = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).abs().amax((1, 3))
    scales = (largest / 448).log2().ceil().exp2()
    factors = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    values = (weight / factors).to(torch.float8_e4m3fn)
    return values, scales, values.float() * factors


def modelopt_blocks(weight: Tensor) -> Written:
    """FP8_PB_WO: scales of blocks have four dimensions."""
    values, scales, full = _float8(weight, 128, 128)
    return {"weight": values, "weight_scale": scales[:, None, :, None]}, full


def modelopt_mxfp8(weight: Tensor) -> Written:
    values, scales, full = _float8(weight, 1, 32)
    return {"weight": values, "weight_scale": (scales.log2() + 127).to(torch.uint8)}, full


def int8_blocks(weight: Tensor) -> Written:
    values, scales, _ = _float8(weight, 128, 128)
    full_tensor = (values.float() / 4).round().to(torch.int8)
    factors = (scales * 4).repeat_interleave(128, 0)[:ROWS].repeat_interleave(128, 1)[:, :COLUMNS]
    return {"weight": full_tensor, "weight_scale": scales * 4}, full_tensor.float() * factors


_BLOCK = {"num_bits": 8, "type": "int", "strategy": "block", "block_structure": [128, 128]}
_TENSOR = {"num_bits": 4, "type": "int", "strategy": "tensor", "symmetric": False}
LAYOUTS: dict[str, Layout] = {
    "modelopt-blocks": ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, modelopt_blocks),
    "modelopt-block-scales": (
        {"quant_method": "modelopt", "quant_algo": "FP8_BLOCK_SCALES"},
        modelopt_blocks,
    ),
    "modelopt-w4a16": ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, nvfp4),
    "modelopt-mxfp8": ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, modelopt_mxfp8),
    "int8-blocks": ({**scheme(**_BLOCK), "format": "int-quantized"}, int8_blocks),
    "one-zero-point": (scheme(**_TENSOR), compressed("pack-quantized", **_TENSOR)),
}


def read(folder: Path, name: str, tensors: dict[str, Tensor]) -> QuantizedWeights:
    stored = {f"{MODULE}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
    save_file(stored, folder / FILE)
    return opened(folder, LAYOUTS[name][0])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_means_what_its_plain_weights_are(name: str, tmp_path: Path) -> None:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(2)) * SPREAD
    tensors, baseline = LAYOUTS[name][1](weight)
    matrix = read(tmp_path, name, tensors).matrix(f"{MODULE}.weight", (ROWS, COLUMNS))
    for rows in (slice(None), slice(100, 150), torch.tensor([199, 2, 128])):
        torch.testing.assert_close(matrix.floats(rows), baseline[rows], rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("name", ["modelopt-blocks", "modelopt-mxfp8", "int8-blocks"])
def test_scales_of_other_blocks_are_refused_by_name(name: str, tmp_path: Path) -> None:
    tensors, _ = LAYOUTS[name][1](torch.randn(ROWS, COLUMNS))
    tensors["weight_scale"] = tensors["weight_scale"][:-1]
    with pytest.raises(ModelLoadError, match=rf"{MODULE}\.weight_scale' has shape") as caught:
        read(tmp_path, name, tensors)
    assert caught.value.param == "weight_scale"


def test_an_exponent_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    tensors, _ = modelopt_mxfp8(torch.randn(ROWS, COLUMNS))
    tensors["weight_scale"][7, 3] = 255
    with pytest.raises(
        ModelLoadError, match=rf"{MODULE}\.weight_scale' has values that aren't fin"
    ):
        read(tmp_path, "modelopt-mxfp8", tensors)


def test_a_zero_point_is_one_or_one_a_group(tmp_path: Path) -> None:
    tensors, _ = LAYOUTS["one-zero-point"][1](torch.randn(ROWS, COLUMNS))
    tensors["weight_zero_point"] = torch.zeros(3, dtype=torch.int8)
    with pytest.raises(ModelLoadError, match=rf"{MODULE}\.weight_zero_point' has shape \(3,\)"):
        read(tmp_path, "one-zero-point", tensors)


@pytest.mark.parametrize("kind", ["pack-quantized", "int-quantized"])
def test_zero_points_beside_symmetric_weights_must_stand_for_none(
    kind: str, tmp_path: Path
) -> None:
    scheme_fields = {"num_bits": 8, "type": "int", "strategy": "channel"}
    config = {**scheme(**scheme_fields), "format": kind}
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    tensors, baseline = compressed(kind, **scheme_fields)(weight)
    none, some = torch.zeros(64, 1, dtype=torch.int8), torch.ones(64, 1, dtype=torch.int8)
    for points in (none, some):
        stored = {
            f"{MODULE}.{part}": t for part, t in {**tensors, "weight_zero_point": points}.items()
        }
        save_file(stored, tmp_path / FILE)
        if points is none:
            matrix = opened(tmp_path, config).matrix(f"{MODULE}.weight", (64, 64))
            torch.testing.assert_close(matrix.floats(slice(None)), baseline)
            continue
        with pytest.raises(ModelLoadError, match=rf"{MODULE}\.weight_zero_point' is there, but"):
            opened(tmp_path, config)


def test_a_scale_whose_inverse_is_no_float_is_refused_by_name(tmp_path: Path) -> None:
    scheme_fields = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    tensors, _ = packed_nvfp4(torch.randn(64, 64))
    tensors["weight_global_scale"] = torch.tensor([1e-42])
    save_file({f"{MODULE}.{part}": t for part, t in tensors.items()}, tmp_path / FILE)
    with pytest.raises(ModelLoadError, match=rf"{MODULE}\.weight_global_scale' is too small"):
        opened(tmp_path, {**scheme(**scheme_fields), "format": "nvfp4-pack-quantized"})
