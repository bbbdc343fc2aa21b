"""HQQ: `W_q` with `scale` and `zero`, both floats, for groups along one axis of the weight.

The weight is laid out as [groups, group] (axis 1) or [group, groups] (axis 0), and as many parts of
its rows as fit share a byte, the first in the highest bits. For 3 bits ten parts share an int32.
(Badri and Shaji, "Half-Quadratic Quantization", 2023.)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.quantization.formats.base import (
    CheckpointFormat,
    ConfigFields,
    LayerTensors,
    TensorSource,
    modules_with,
)
from engine.quantization.formats.matrices import GroupedMatrix, row_numbers
from engine.quantization.packing import Rows, WeightSource

_AXIS = "must be 1: take a checkpoint that was quantized with axis=1"
_PARTS = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
_META = (
    "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float",
    "compute_dtype", "quant_scale", "quant_zero", "offload_meta", "encoded_state_dict",
    "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip


class HQQ(CheckpointFormat):
    """See `CheckpointFormat`. Only axis 1, as in other libraries' kernels."""

    name = "hqq"

    def __init__(self, fields: ConfigFields) -> None:
        config = fields.object("quant_config") or fields
        weights = config.object("weight_quant_params") or config
        self._bits = weights.integer("nbits", 4, _PARTS)
        self._group = weights.integer("group_size", 64)
        if weights.integer("axis", 1) != 1:
            raise weights.error("axis", _AXIS)
        for name in ("quant_scale", "quant_zero"):
            if weights.boolean(name, False):
                raise weights.error(name, "is on: quantized scales and zero points aren't read")

    def modules(self, tensors: TensorSource) -> Iterable[str]:
        return modules_with(tensors, "W_q")

    def suffixes(self) -> Iterable[str]:
        return "W_q", "scale", "zero", *_META

    def matrix(self, parts: LayerTensors) -> WeightSource:
        bits, group = (
            self._number(parts, "nbits", self._bits),
            self._number(parts, "group_size", self._group),
        )
        if bits not in _PARTS or group < 1:
            raise parts.error("nbits", f"is {bits} with groups of {group}")
        if self._number(parts, "axis", 1) != 1:
            raise parts.error("axis", _AXIS)
        packed_dtype = torch.int32 if bits == 3 else torch.uint8
        packed = parts.read("W_q", (packed_dtype,))
        rows, columns = self._shape(parts)
        total = rows * columns // group
        below = -(-total // _PARTS[bits])
        if rows * columns % group or columns % group or packed.numel() != below * group:
            raise parts.error("W_q", f"doesn't hold {rows} x {columns} in groups of {group}")
        flat, groups_per_row = packed.reshape(below, group), columns // group
        # [1, groups] would mean axis 0.
        scales = parts.scales("scale", (total, 1), (total,))
        zeros = parts.scales("zero", (total, 1), (total,)).reshape(rows, groups_per_row)

        def values(selected: Rows) -> Tensor:
            numbers = row_numbers(selected, rows)[:, None] * groups_per_row + torch.arange(
                groups_per_row
            )
            shift = (_PARTS[bits] - 1 - numbers // below) * bits
            numerals = flat[numbers % below].to(torch.int32) >> shift[..., None].to(torch.int32)
            return (numerals & ((1 << bits) - 1)).flatten(1)

        return GroupedMatrix(
            f"hqq int{bits} g{group}", (rows, columns), group, bits, values,
            scales.reshape(rows, groups_per_row), lambda selected: zeros[selected],
            integer_zeros=False,
        )  # fmt: skip

    def _number(self, parts: LayerTensors, suffix: str, default: int) -> int:
        """Return the weight's parameters, by default the config's."""
        if suffix not in parts:
            return default
        return parts.number(suffix, _INTEGERS)

    def _shape(self, parts: LayerTensors) -> tuple[int, int]:
        shape = parts.read("shape", _INTEGERS, (2,)).tolist()
        if min(shape) < 1:
            raise parts.error("shape", f"is {shape}")
        return shape[0], shape[1]


_INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.int16)
