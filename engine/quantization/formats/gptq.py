"""GPTQ, as AutoGPTQ, GPTQModel and AutoRound write it.

`qweight` int32 [K * bits / 32, N] and `qzeros` int32 [groups, N * bits / 32] without gaps, `scales`
[groups, N], `g_idx` int32 [K]: the group of each input. Version 1 stores zero points minus one.
(Frantar et al., "GPTQ", 2022.)
"""

from __future__ import annotations

from collections.abc import Iterable

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
    WORD,
    GroupedMatrix,
    pick,
    pick_stream,
    row_numbers,
    unpack_stream,
)
from engine.quantization.packing import Rows, WeightSource

#: By bits: index i in a word holds output (0, 2, 4, 6, 1, 3, 5, 7)[i], or (0, 2, 1, 3)[i]; this is
#: the index of each output.
_POSITIONS = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}


class AWQ(CheckpointFormat):
    """AWQ in GEMM order: `qweight` int32 [K, N * bits / 32], `qzeros` [groups, N * bits / 32],
    `scales` [groups, N].

    Eight outputs, or four of 8 bits, share a word, in a special order. (Lin et al., "AWQ", 2023.)
    """

    name = "awq"

    def __init__(self, fields: ConfigFields) -> None:
        name = "bits" if fields.get("bits") is not None else "w_bit"
        self._bits = fields.integer(name, 4, _POSITIONS)
        size = "group_size" if fields.get("group_size") is not None else "q_group_size"
        self._group = fields.integer(size, 128)
        if self._group < 1 and self._group != -1:
            raise fields.error(size, f"is {self._group}, not -1 or a positive number")
        version = fields.string("version", "gemm")
        if version not in ("gemm", "exllama"):
            raise fields.error(
                "version", f"is {version!r}: take the checkpoint in GEMM order, which is read"
            )

    def modules(self, tensors: TensorSource) -> Iterable[str]:
        return modules_with(tensors, "qweight")

    def suffixes(self) -> Iterable[str]:
        return "qweight", "qzeros", "scales"

    def matrix(self, parts: LayerTensors) -> WeightSource:
        columns, words = parts.shape("qweight", 2)
        bits, positions = self._bits, _POSITIONS[self._bits]
        rows = words * WORD // bits
        group = columns if self._group == -1 else min(self._group, columns)
        groups = -(-columns // group)
        qweight = parts.read("qweight", (torch.int32,))
        qzeros = parts.read("qzeros", (torch.int32,), (groups, words))
        scales = parts.scales("scales", (groups, rows))
        return GroupedMatrix(
            f"awq int{bits} g{group}",
            (rows, columns),
            group,
            bits,
            lambda selected: pick(qweight, selected, bits, rows, positions).T,
            scales.T,
            lambda selected: pick(qzeros, selected, bits, rows, positions).T,
        )


BITS = (2, 3, 4, 8)
_LAYOUTS = {"": True, "gptq": True, "gptq_v2": False}


class GPTQ(CheckpointFormat):
    """See `CheckpointFormat`."""

    name = "gptq"

    def __init__(self, fields: ConfigFields) -> None:
        #: With rules by name layers may differ: shapes show their parameters.
        self._varies = bool(fields.get("dynamic") or fields.get("extra_config"))
        self._bits = fields.integer("bits", 4, BITS)
        self._group = fields.integer("group_size", 128)
        if self._group < 1 and self._group != -1:
            raise fields.error("group_size", f"is {self._group}, not -1 or a positive number")
        layout = fields.string("checkpoint_format")
        if layout not in _LAYOUTS:
            raise fields.error("checkpoint_format", f"is {layout!r}; known are gptq and gptq_v2")
        self._less_one = _LAYOUTS[layout]

    def modules(self, tensors: TensorSource) -> Iterable[str]:
        return modules_with(tensors, "qweight")

    def suffixes(self) -> Iterable[str]:
        return "qweight", "qzeros", "scales", "g_idx"

    def matrix(self, parts: LayerTensors) -> WeightSource:
        words, rows = parts.shape("qweight", 2)
        groups, bits = parts.shape("scales", 2)[0], self._bits_of(parts, rows)
        if words % bits and WORD % bits:
            raise parts.error("qweight", f"has {words} words a column, which isn't whole")
        columns = words * WORD // bits
        group = self._group_of(parts, columns, groups)
        qweight = parts.read("qweight", (torch.int32,))
        qzeros = parts.read("qzeros", (torch.int32,), (groups, rows * bits // WORD))
        scales = parts.scales("scales", (groups, rows), dtypes=FLOATS)

        def zeros(selected: Rows) -> Tensor:
            points = pick_stream(qzeros, selected, bits, rows).T
            return (points + 1) & ((1 << bits) - 1) if self._less_one else points

        return GroupedMatrix(
            f"gptq int{bits} g{group}",
            (rows, columns),
            group,
            bits,
            lambda selected: _columns(qweight, selected, bits, rows),
            scales.T,
            zeros,
            self._order(parts, columns, groups, group),
        )

    def _bits_of(self, parts: LayerTensors, rows: int) -> int:
        """Return one layer's bits, by the width of its zero points."""
        words = parts.shape("qzeros", 2)[1]
        bits = words * WORD // rows
        if bits * rows != words * WORD or bits not in BITS:
            raise parts.error("qzeros", f"has {words} words a row, which is wrong for {rows} rows")
        if not self._varies and bits != self._bits:
            raise parts.error("qzeros", f"has {bits} bits a value, but bits is {self._bits}")
        return bits

    def _group_of(self, parts: LayerTensors, columns: int, groups: int) -> int:
        group = columns if self._group == -1 else min(self._group, columns)
        if self._varies and columns % groups == 0:
            group = columns // groups
        if -(-columns // group) != groups:
            raise parts.error(
                "scales",
                f"has {groups} groups, but {columns} inputs make up "
                f"{-(-columns // group)} of {group}",
            )
        return group

    def _order(self, parts: LayerTensors, columns: int, groups: int, group: int) -> Tensor | None:
        """Return the group of each input, if inputs were sorted."""
        if "g_idx" not in parts:
            return None
        return group_order(parts, "g_idx", columns, groups, group)


def group_order(
    parts: LayerTensors, suffix: str, columns: int, groups: int, group: int
) -> Tensor | None:
    """Return int64 [K], the group of each input; None if groups are consecutive."""
    group_ids = parts.read(suffix, (torch.int32, torch.int64), (columns,)).long()
    if bool((group_ids == torch.arange(columns) // group).all()):
        return None
    if int(group_ids.min()) < 0 or int(group_ids.max()) >= groups:
        raise parts.error(suffix, f"names a group that isn't among the {groups}")
    return group_ids


def _columns(qweight: Tensor, rows: Rows, bits: int, count: int) -> Tensor:
    """Return uint8 [n, K]: some outputs of words [K * bits / 32, N]."""
    words = (
        qweight[:, row_numbers(rows, count)] if not isinstance(rows, slice) else qweight[:, rows]
    )
    return unpack_stream(words.T.contiguous(), bits)
