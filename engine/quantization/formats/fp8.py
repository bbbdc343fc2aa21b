"""Weights in e4m3 or e5m2 with scales: `fp8`, `fbgemm_fp8`, and similar formats.

`weight` float8 [N, K], and `weight_scale` (or `weight_scale_inv`, which isn't an inverse either)
for the complete weight, for each row, or for blocks; in MXFP8 exponents for 32 neighbors. Scales of
activations are ignored: activations aren't quantized.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.quantization.formats.base import (
    FLOAT8,
    FLOATS,
    NAN_EXPONENT,
    POWERS,
    CheckpointFormat,
    ConfigFields,
    Dtypes,
    LayerTensors,
    TensorSource,
    modules_with,
)
from engine.quantization.formats.bitmask import SparseRows, stored_weight
from engine.quantization.formats.matrices import ScaledMatrix
from engine.quantization.packing import WeightSource

#: Dtype of scales that are powers of two.
EXPONENTS = (*POWERS, torch.uint8)
_SCALES = ("weight_scale_inv", "weight_scale")


class FP8(CheckpointFormat):
    """See `CheckpointFormat`."""

    name = "fp8"

    def __init__(self, fields: ConfigFields) -> None:
        self._block = fields.pair("weight_block_size")
        if fields.string("activation_scheme", "dynamic") not in ("dynamic", "static"):
            raise fields.error("activation_scheme", "must be dynamic or static")

    def modules(self, tensors: TensorSource) -> Iterable[str]:
        return float8_modules(tensors)

    def suffixes(self) -> Iterable[str]:
        return "weight", *_SCALES, "input_scale", "activation_scale", "input_scale_ub"

    def matrix(self, parts: LayerTensors) -> WeightSource:
        suffix = next((name for name in _SCALES if name in parts), "weight_scale")
        return float8_matrix(parts, suffix, self._block, self.name)


def float8_modules(tensors: TensorSource) -> list[str]:
    """Return the layers whose `weight` consists of 8-bit floats."""
    modules = modules_with(tensors, "weight")
    return [name for name in modules if tensors.stored_dtype(f"{name}.weight") in FLOAT8]


def float8_matrix(
    parts: LayerTensors,
    suffix: str,
    block: tuple[int, int] | None,
    source: str,
    dtypes: Dtypes = (*FLOATS, *EXPONENTS),
) -> WeightSource:
    """A weight of 8-bit floats; the shape of its scales, of these dtypes, shows their layout."""
    values = stored_weight(parts, FLOAT8)
    rows, columns = values.shape
    shapes = [(), (1,), (1, 1), (rows,), (rows, 1)]
    if block is not None:
        high, wide = -(-rows // block[0]), -(-columns // block[1])
        shapes += [(high, wide), (high, 1, wide, 1)]
    scales = parts.scales(suffix, *shapes, dtypes=dtypes)
    if scales.dtype == torch.uint8:
        # Powers of two (e8m0), which MXFP8 stores as bytes.
        if bool((scales == NAN_EXPONENT).any()):
            raise parts.error(suffix, "has values that aren't finite")
        scales = scales.view(POWERS[0])
    return float8_scaled(parts, values, _as_two(scales, rows), source, block)


def _as_two(scales: Tensor, rows: int) -> Tensor:
    """Return scales as [rows or 1, columns]; ModelOpt's of blocks are [rows, 1, columns, 1]."""
    if scales.dim() == 4:
        return scales[:, 0, :, 0]
    return scales.reshape(1 if scales.numel() == 1 else rows, 1) if scales.dim() < 2 else scales


def float8_scaled(
    parts: LayerTensors,
    values: Tensor | SparseRows,
    scales: Tensor,
    source: str,
    block: tuple[int, int] | None = None,
) -> WeightSource:
    """8-bit floats [N, K] with scales [1 or N or blocks, 1 or blocks]."""
    rows, columns = values.shape
    source = f"{source} {'e5m2' if values.dtype == torch.float8_e5m2 else 'e4m3'}"
    if scales.numel() == 1:
        return ScaledMatrix(source, values, scales, (rows, columns))
    if tuple(scales.shape) == (rows, 1):
        return ScaledMatrix(f"{source} by row", values, scales, (1, columns))
    size = block or (-(-rows // scales.shape[0]), -(-columns // scales.shape[1]))
    if tuple(scales.shape) != (-(-rows // size[0]), -(-columns // size[1])):
        raise parts.error("weight_scale", f"has shape {tuple(scales.shape)} for blocks of {size}")
    return ScaledMatrix(f"{source} {size[0]}x{size[1]}", values, scales, size)
