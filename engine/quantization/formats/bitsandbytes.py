"""bitsandbytes: nf4 and fp4 with a table, whose scales may be quantized too, and int8.

Four bits: `weight` uint8 [N * K / 2, 1] (the first of two values in the high half), whose bytes may
be declared as floats; `weight.absmax` for each block of the flattened weight, `weight.quant_map`
[16], and JSON in `weight.quant_state.bitsandbytes__nf4`; nested scales add `weight.nested_absmax`
and `weight.nested_quant_map`. Eight: `weight` int8 [N, K] and `SCB` [N], 127 times the scales.
(Dettmers et al., "QLoRA", 2023.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from engine.quantization.formats.base import (
    FLOATS,
    CheckpointFormat,
    ConfigFields,
    LayerTensors,
    TensorSource,
    modules_with,
)
from engine.quantization.formats.matrices import (
    CodebookMatrix,
    GroupedMatrix,
    kernel_group_size,
    nibbles,
    row_numbers,
)
from engine.quantization.packing import Rows, WeightSource

_FLOAT = (torch.float32,)
_STATES = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
_SMALL = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
#: Suffixes that each identify a packed layer.
_MARKS = ("weight.absmax", *_STATES.values(), "SCB")
#: Maximum bytes of a weight's JSON: a few names and numbers.
_MAX_STATE_BYTES = 4096


class BitsAndBytes(CheckpointFormat):
    """See `CheckpointFormat`."""

    name = "bitsandbytes"

    def __init__(self, fields: ConfigFields) -> None:
        four, eight = fields.get("load_in_4bit"), fields.get("load_in_8bit")
        if not four and not eight:
            raise fields.error("load_in_4bit", "and load_in_8bit are both off")

    def modules(self, tensors: TensorSource) -> Iterable[str]:
        """See `CheckpointFormat`; includes a layer whose weight is bytes without scales."""
        scaled = [name for suffix in _MARKS for name in modules_with(tensors, suffix)]
        packed = (torch.uint8, torch.int8)
        weights = modules_with(tensors, "weight")
        weight_modules = [n for n in weights if tensors.stored_dtype(f"{n}.weight") in packed]
        return sorted({*scaled, *weight_modules})

    def suffixes(self) -> Iterable[str]:
        small = (f"weight.{part}" for part in _SMALL)
        return ("weight", *small, *_STATES.values(), "SCB", "weight_format")

    def matrix(self, parts: LayerTensors) -> WeightSource:
        four = any(suffix in parts for suffix in ("weight.absmax", *_STATES.values()))
        return _four_bits(parts) if four else _eight_bits(parts)


def _eight_bits(parts: LayerTensors) -> WeightSource:
    rows, columns = parts.shape("weight", 2)
    values = parts.read("weight", (torch.int8,))
    kind = (torch.uint8, torch.int8)
    if "weight_format" in parts and parts.number("weight_format", kind) != 0:
        raise parts.error("weight_format", "says another order than rows, which isn't read")
    scales = parts.scales("SCB", (rows,), (rows, 1))
    return GroupedMatrix(
        "bitsandbytes int8", (rows, columns), columns, 8, lambda selected: values[selected],
        scales.view(rows, 1), factor=1.0 / 127.0,
    )  # fmt: skip


def _four_bits(parts: LayerTensors) -> WeightSource:
    kind = next((kind for kind, suffix in _STATES.items() if suffix in parts), None)
    if kind is None:
        raise parts.error(_STATES["nf4"], "isn't there, nor is that of fp4")
    state = _State(parts, _STATES[kind])
    rows, columns = state.shape("shape")
    if columns % 2:
        raise parts.error("weight", f"has rows of {columns} values, which don't end with a byte")
    count, block = rows * columns, state.number("blocksize")
    packed = parts.read("weight", (torch.uint8, *FLOATS)).reshape(-1).view(torch.uint8)
    if packed.numel() * 2 != count:
        raise parts.error("weight", f"holds {packed.numel() * 2} values, not {rows} x {columns}")
    table = parts.scales("weight.quant_map", (16,), dtypes=_FLOAT)
    scales = _scales(parts, state, -(-count // block))
    flat = packed.reshape(rows, columns // 2)
    within = torch.arange(columns)

    def factors(selected: Rows) -> Tensor:
        first = row_numbers(selected, rows)[:, None] * columns
        if columns % block == 0:
            blocks = first // block + torch.arange(columns // block)
            return scales(blocks).repeat_interleave(block, 1)
        return scales((first + within) // block)

    return CodebookMatrix(
        f"bitsandbytes {kind}",
        (rows, columns),
        lambda selected: nibbles(flat[selected], high_first=True),
        lambda _: table[None],
        factors,
        # Blocks don't end with rows: a row may begin within one.
        group=kernel_group_size(math.gcd(block, columns), columns),
    )


def _scales(parts: LayerTensors, state: _State, blocks: int) -> Callable[[Tensor], Tensor]:
    """Return the scales of blocks by index."""
    if "weight.nested_absmax" not in parts:
        scales = parts.scales("weight.absmax", (blocks,), dtypes=_FLOAT)
        return lambda selected: scales[selected]
    size = state.number("nested_blocksize")
    values = parts.read("weight.absmax", (torch.uint8,), (blocks,))
    table = parts.scales("weight.nested_quant_map", (256,), dtypes=_FLOAT)
    outer = parts.scales("weight.nested_absmax", (-(-blocks // size),), dtypes=_FLOAT)
    offset = state.real("nested_offset")
    return lambda selected: table[values[selected].long()] * outer[selected // size] + offset


class _State:
    """A weight's JSON."""

    def __init__(self, parts: LayerTensors, suffix: str) -> None:
        self._parts, self._suffix = parts, suffix
        raw = parts.read(suffix, (torch.uint8,))
        if raw.numel() > _MAX_STATE_BYTES:
            raise parts.error(suffix, f"has {raw.numel()} bytes, which is too much for its JSON")
        try:
            state: Any = json.loads(bytes(raw.flatten().tolist()))
        except (ValueError, RecursionError) as error:
            raise parts.error(suffix, f"holds no JSON: {error}") from error
        if not isinstance(state, dict):
            raise parts.error(suffix, "holds no object")
        self._values = state

    def number(self, name: str) -> int:
        """Return a positive integer."""
        value = self._values.get(name)
        if type(value) is not int or value < 1:
            raise self._parts.error(self._suffix, f"has {name} {value!r}")
        return value

    def real(self, name: str) -> float:
        """Return a finite number."""
        value = self._values.get(name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise self._parts.error(self._suffix, f"has {name} {value!r}")
        return float(value)

    def shape(self, name: str) -> tuple[int, int]:
        """Return two positive integers."""
        value = self._values.get(name)
        if not isinstance(value, list) or len(value) != 2 or not all(map(_is_size, value)):
            raise self._parts.error(self._suffix, f"has {name} {value!r}")
        return value[0], value[1]


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0
