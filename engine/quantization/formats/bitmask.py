"""compressed-tensors' sparse weights: nonzero values, and a bit mask of their positions.

`compressed` [n], or [N, K / 2] with two of four neighbors stored; `bitmask` uint8
[N, ceil(K / 8)], lowest bit first; `shape` (N, K); `row_offsets` follow from the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quantization.formats.base import Dtypes, LayerTensors
from engine.quantization.packing import DequantizedSource, Rows

#: Number of rows whose mask is unpacked at once for validation.
_ROWS_AT_ONCE = 256


class SparseRows:
    """A weight [N, K] that is converted to dense a few rows at a time.

    Raises `ModelLoadError` if mask, shape and values are inconsistent.
    """

    def __init__(self, parts: LayerTensors, dtypes: Dtypes) -> None:
        shape = parts.read("shape", (torch.int64, torch.int32)).flatten().tolist()
        if len(shape) != 2 or min(shape) < 1:
            raise parts.error("shape", f"is {shape}, not two positive numbers")
        rows, columns = self.shape = shape[0], shape[1]
        self._mask = parts.read("bitmask", (torch.uint8,), (rows, -(-columns // 8)))
        values = parts.read("compressed", dtypes)
        self._values, self.dtype = values.reshape(-1), values.dtype
        starts = range(0, rows, _ROWS_AT_ONCE)
        counts = [self._dense_mask(slice(i, i + _ROWS_AT_ONCE)).sum(1) for i in starts]
        self._ends = torch.cat(counts).cumsum(0)
        if int(self._ends[-1]) != len(self._values):
            raise parts.error(
                "compressed",
                f"has {len(self._values)} values, but the bit mask names {int(self._ends[-1])}",
            )

    def _dense_mask(self, rows: Rows) -> Tensor:
        bits = self._mask[rows][..., None] >> torch.arange(8, dtype=torch.uint8) & 1
        return bits.flatten(1)[:, : self.shape[1]].bool()

    def __getitem__(self, rows: Rows) -> Tensor:
        """Return rows [n, K], in the stored dtype."""
        ends = self._ends.tolist()
        numbers = range(self.shape[0])[rows] if isinstance(rows, slice) else rows.tolist()
        is_byte = self.dtype.itemsize == 1  # torch can't index 8-bit floats
        values = self._values.view(torch.uint8) if is_byte else self._values
        chunks = [values[ends[number - 1] if number else 0 : ends[number]] for number in numbers]
        mask = self._dense_mask(rows)
        dense = torch.zeros(mask.shape, dtype=values.dtype)
        dense[mask] = torch.cat(chunks) if chunks else values[:0]
        return dense.view(self.dtype)


class SparseSource(DequantizedSource):
    """A sparse weight that isn't quantized."""

    quantized: bool = False

    def __init__(self, rows: SparseRows) -> None:
        self._rows, self.shape = rows, rows.shape
        self.source = f"sparse {str(rows.dtype).removeprefix('torch.')}"
        self.bits = 8 * rows.dtype.itemsize
        self.row_bytes = rows.shape[1] * (rows.dtype.itemsize + 8)

    def floats(self, rows: Rows) -> Tensor:
        """See `WeightSource`."""
        return self._rows[rows]


def stored_weight(parts: LayerTensors, dtypes: Dtypes) -> Tensor | SparseRows:
    """Return a layer's `weight` [N, K] of these dtypes, dense or sparse."""
    if "compressed" in parts:
        return SparseRows(parts, dtypes)
    parts.shape("weight", 2)
    return parts.read("weight", dtypes)
