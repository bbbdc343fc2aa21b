"""SqueezeLLM: `qweight` int32 [K / 8, N] of entries in `lookup_table` [N, 16].

(Kim et al., "SqueezeLLM", 2023.)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.quantization.checkpoint.bits import row_numbers, unpack_stream
from engine.quantization.checkpoint.fields import Fields
from engine.quantization.checkpoint.format import CheckpointFormat
from engine.quantization.checkpoint.table import TableMatrix
from engine.quantization.checkpoint.tensors import Parts, Tensors, modules_with
from engine.quantization.matrix import Matrix

_SPARSE = ("rows", "cols", "vals", "full_rows", "full_row_indices")


class SqueezeLLM(CheckpointFormat):
    """See `CheckpointFormat`."""

    name = "squeezellm"

    def __init__(self, fields: Fields) -> None:
        fields.integer("wbits", 4, (4,))

    def modules(self, tensors: Tensors) -> Iterable[str]:
        """See `CheckpointFormat`."""
        return modules_with(tensors, "lookup_table")

    def suffixes(self) -> Iterable[str]:
        """See `CheckpointFormat`."""
        return "qweight", "lookup_table", *_SPARSE

    def matrix(self, parts: Parts) -> Matrix:
        """See `CheckpointFormat`."""
        for suffix in _SPARSE:
            if suffix in parts:
                raise parts.wrong(suffix, "belongs to sparse outliers: take the dense-only file")
        words, rows = parts.shape("qweight", 2)
        packed = parts.take("qweight", (torch.int32,))
        table = parts.scales("lookup_table", (rows, 16))
        return TableMatrix(
            "squeezellm int4",
            (rows, words * 8),
            lambda at: unpack_stream(packed[:, row_numbers(at, rows)].T.contiguous(), 4),
            lambda at: table[at],
        )
