"""torchao's tensors in safetensors, as `transformers` writes them.

`layer.weight` is stored as `layer._weight_qdata` and so on; the files' headers name its class.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from engine.quantization.formats.base import (
    FLOAT8,
    FLOATS,
    CheckpointFormat,
    ConfigFields,
    LayerTensors,
    TensorSource,
    modules_with,
)
from engine.quantization.formats.fp8 import float8_scaled
from engine.quantization.formats.matrices import GroupedMatrix
from engine.quantization.packing import WeightSource

_DATA, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_ACTIVATION_TENSORS = (
    "_weight_act_quant_scale",
    "_weight_act_quant_zero_point",
    "_weight_act_pre_scale",
)
_CLASSES = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")


class TorchAO(CheckpointFormat):
    """See `CheckpointFormat`."""

    name = "torchao"

    def __init__(self, fields: ConfigFields) -> None:
        pass

    def modules(self, tensors: TensorSource) -> Iterable[str]:
        return modules_with(tensors, _DATA)

    def suffixes(self) -> Iterable[str]:
        return _DATA, _SCALE, _ZERO, *_ACTIVATION_TENSORS

    def matrix(self, parts: LayerTensors) -> WeightSource:
        kind = _class_of(parts)
        if kind not in _CLASSES:
            raise parts.error(
                _DATA,
                f"is of {kind}, whose layout is a GPU's: take an int8 or a float8 one of "
                "torchao, or a GPTQ or AWQ checkpoint",
            )
        if "_weight_act_pre_scale" in parts:
            raise parts.error("_weight_act_pre_scale", "scales inputs, which isn't done here")
        rows, columns = parts.shape(_DATA, 2)
        if kind == "Float8Tensor":
            values = parts.read(_DATA, FLOAT8)
            return float8_scaled(parts, values, _block_scales(parts, rows, columns), "torchao")
        return _integers(parts, rows, columns)


def _integers(parts: LayerTensors, rows: int, columns: int) -> WeightSource:
    values = parts.read(_DATA, (torch.int8,))
    scales = _block_scales(parts, rows, columns)
    groups = scales.shape[1]
    if columns % groups or scales.shape[0] not in (1, rows):
        raise parts.error(_SCALE, f"has shape {tuple(scales.shape)} for {rows} x {columns}")
    scales = scales.expand(rows, groups)
    name, shape, group = f"torchao int8 g{columns // groups}", (rows, columns), columns // groups
    zeros = _zeros(parts, scales)
    if zeros is None:
        return GroupedMatrix(name, shape, group, 8, lambda selected: values[selected], scales)
    points = zeros + 128.0
    integral = (points == points.round()) & (points >= 0) & (points <= 255)
    return GroupedMatrix(
        name, shape, group, 8, lambda selected: values[selected].to(torch.int32) + 128, scales,
        lambda selected: points[selected], integer_zeros=bool(integral.all()),
    )  # fmt: skip


def _block_scales(parts: LayerTensors, rows: int, columns: int) -> Tensor:
    """Return scales [N or 1 or fewer, groups]."""
    scales = parts.read(_SCALE, FLOATS)
    if not bool(torch.isfinite(scales).all()):
        raise parts.error(_SCALE, "has values that aren't finite")
    if scales.numel() == 1:
        return scales.reshape(1, 1)
    if scales.dim() == 1 and scales.numel() == rows:
        return scales.reshape(rows, 1)
    if (
        scales.dim() != 2
        or 0 in scales.shape
        or scales.shape[0] > rows
        or scales.shape[1] > columns
    ):
        raise parts.error(_SCALE, f"has shape {tuple(scales.shape)} for {rows} x {columns}")
    return scales


def _zeros(parts: LayerTensors, scales: Tensor) -> Tensor | None:
    """Return zero points float32 [N, groups]; None if all are 0."""
    if _ZERO not in parts:
        return None
    points = parts.read(_ZERO, (*FLOATS, torch.int8, torch.int32, torch.int64))
    if points.numel() not in (1, scales.numel()):
        raise parts.error(_ZERO, f"has shape {tuple(points.shape)}, not {tuple(scales.shape)}")
    if not bool(points.any()):
        return None
    return points.float().reshape(scales.shape if points.numel() > 1 else (1, 1)).expand_as(scales)


def _class_of(parts: LayerTensors) -> str:
    """Return what the header says about a weight, all of whose tensors must exist."""
    header = parts.tensors.metadata.get(parts.name("weight"))
    if header is None:
        raise parts.error(_DATA, "has no entry in the file's header that tells its class")
    try:
        entry: Any = json.loads(header)
        kind, names = str(entry["_type"]), entry.get("_tensor_data_names") or []
        suffixes = [f"_weight_{name}" for name in names]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise parts.error(_DATA, f"has an unsound entry in the file's header: {error}") from error
    for suffix in suffixes:
        if suffix not in parts:
            raise parts.error(suffix, "isn't there, and the file's header names it")
    return kind
