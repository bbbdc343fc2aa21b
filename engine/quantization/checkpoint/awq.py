"""AWQ in GEMM order."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.quantization.checkpoint.bits import WORD, pick
from engine.quantization.checkpoint.fields import Fields
from engine.quantization.checkpoint.format import CheckpointFormat
from engine.quantization.checkpoint.grouped import GroupedMatrix
from engine.quantization.checkpoint.tensors import Parts, Tensors, modules_with
from engine.quantization.matrix import Matrix

#: By bits: place i of a word holds output (0, 2, 4, 6, 1, 3, 5, 7)[i], or (0, 2, 1, 3)[i]; this is
#: where each output lies.
_PLACES = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}


class AWQ(CheckpointFormat):
    """AWQ in GEMM order: `qweight` int32 [K, N * bits / 32], `qzeros` [groups, N * bits / 32],
    `scales` [groups, N].

    Eight outputs, of 8 bits four, share a word, in an order of their own. (Lin et al., "AWQ",
    2023.)
    """

    name = "awq"

    def __init__(self, fields: Fields) -> None:
        name = "bits" if fields.get("bits") is not None else "w_bit"
        self._bits = fields.integer(name, 4, _PLACES)
        size = "group_size" if fields.get("group_size") is not None else "q_group_size"
        self._group = fields.integer(size, 128)
        if self._group < 1 and self._group != -1:
            raise fields.wrong(size, f"is {self._group}, not -1 or a positive number")
        version = fields.word("version", "gemm")
        if version not in ("gemm", "exllama"):
            raise fields.wrong(
                "version", f"is {version!r}: take the checkpoint in GEMM order, which is read"
            )

    def modules(self, tensors: Tensors) -> Iterable[str]:
        """See `CheckpointFormat`."""
        return modules_with(tensors, "qweight")

    def suffixes(self) -> Iterable[str]:
        """See `CheckpointFormat`."""
        return "qweight", "qzeros", "scales"

    def matrix(self, parts: Parts) -> Matrix:
        """See `CheckpointFormat`."""
        columns, words = parts.shape("qweight", 2)
        bits, places = self._bits, _PLACES[self._bits]
        rows = words * WORD // bits
        group = columns if self._group == -1 else min(self._group, columns)
        groups = -(-columns // group)
        qweight = parts.take("qweight", (torch.int32,))
        qzeros = parts.take("qzeros", (torch.int32,), (groups, words))
        scales = parts.scales("scales", (groups, rows))
        return GroupedMatrix(
            f"awq int{bits} g{group}",
            (rows, columns),
            group,
            bits,
            lambda at: pick(qweight, at, bits, rows, places).T,
            scales.T,
            lambda at: pick(qzeros, at, bits, rows, places).T,
        )
