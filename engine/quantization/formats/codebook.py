"""AQLM: sums of vectors from codebooks.

`codes` int8 or int16 [N / out, K / in, books], `codebooks` [books, entries, out, in], `scales`
[N / out, 1, 1, 1]. (Egiazarian et al., "Extreme Compression of Large Language Models via Additive
Quantization", 2024.)
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
from engine.quantization.formats.matrices import CodebookMatrix, row_numbers, unpack_stream
from engine.quantization.packing import DequantizedSource, Rows, WeightSource

# SqueezeLLM: `qweight` int32 [K / 8, N] of indices into `lookup_table` [N, 16].
#
# (Kim et al., "SqueezeLLM", 2023.)


_SPARSE = ("rows", "cols", "vals", "full_rows", "full_row_indices")


class SqueezeLLM(CheckpointFormat):
    """See `CheckpointFormat`."""

    name = "squeezellm"

    def __init__(self, fields: ConfigFields) -> None:
        fields.integer("wbits", 4, (4,))

    def modules(self, tensors: TensorSource) -> Iterable[str]:
        return modules_with(tensors, "lookup_table")

    def suffixes(self) -> Iterable[str]:
        return "qweight", "lookup_table", *_SPARSE

    def matrix(self, parts: LayerTensors) -> WeightSource:
        for suffix in _SPARSE:
            if suffix in parts:
                raise parts.error(suffix, "belongs to sparse outliers: take the dense-only file")
        words, rows = parts.shape("qweight", 2)
        packed = parts.read("qweight", (torch.int32,))
        table = parts.scales("lookup_table", (rows, 16))
        return CodebookMatrix(
            "squeezellm int4",
            (rows, words * 8),
            lambda selected: unpack_stream(
                packed[:, row_numbers(selected, rows)].T.contiguous(), 4
            ),
            lambda selected: table[selected],
        )


_WIDTHS = {torch.int8: 1 << 8, torch.int16: 1 << 16}


class AQLM(CheckpointFormat):
    """See `CheckpointFormat`."""

    name = "aqlm"

    def __init__(self, fields: ConfigFields) -> None:
        pass

    def modules(self, tensors: TensorSource) -> Iterable[str]:
        return modules_with(tensors, "codebooks")

    def suffixes(self) -> Iterable[str]:
        return "codes", "codebooks", "scales"

    def matrix(self, parts: LayerTensors) -> WeightSource:
        books, entries, high, wide = parts.shape("codebooks", 4)
        num_rows, num_groups, _ = parts.shape("codes", 3)
        codes = parts.read("codes", tuple(_WIDTHS), (num_rows, num_groups, books))
        if entries > _WIDTHS[codes.dtype]:
            raise parts.error("codes", f"of {codes.dtype} can't number {entries} entries")
        codebooks = parts.scales("codebooks", (books, entries, high, wide))
        scales = parts.scales("scales", (num_rows, 1, 1, 1))
        # All codes of a type may be used; unsigned ones are stored as signed.
        all_used = entries == _WIDTHS[codes.dtype]
        if not all_used and (int(codes.min()) < 0 or int(codes.max()) >= entries):
            raise parts.error("codes", f"names an entry that isn't among the {entries}")
        return _Sums(codes, codebooks, scales.view(num_rows))


class _Sums(DequantizedSource):
    """A `WeightSource` of sums of codebook vectors."""

    quantized = False
    bits = 2
    source = "aqlm"

    def __init__(self, codes: Tensor, codebooks: Tensor, scales: Tensor) -> None:
        self._high, self._wide = codebooks.shape[2:]
        self.shape = (codes.shape[0] * self._high, codes.shape[1] * self._wide)
        self.row_bytes = self.shape[1] * 16
        self._codes, self._codebooks, self._scales = codes, codebooks, scales

    def floats(self, rows: Rows) -> Tensor:
        """See `WeightSource`: float32, not rounded."""
        numbers = row_numbers(rows, self.shape[0])
        above, within = numbers // self._high, numbers % self._high
        codes = self._codes[above].long() % self._codebooks.shape[1]
        total = torch.zeros(len(numbers), codes.shape[1], self._wide)
        for book, entries in enumerate(self._codebooks):
            total += entries[codes[..., book], within[:, None]].float()
        return total.flatten(1).mul_(self._scales[above].float()[:, None])
