"""A weight whose rows a file keeps in several tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.models.gguf.matrix import GGUFMatrix
from engine.quantization.checkpoint.bits import row_numbers
from engine.quantization.matrix import Plain, Rows
from kernels.interface import Integers


class Gathered(Plain):
    """A `Matrix` of rows of others.

    Args:
        parts: of as many columns each.
        part_of, row_of: of each row, which part has it, and where; int64 [N].
    """

    def __init__(self, parts: Sequence[GGUFMatrix], part_of: Tensor, row_of: Tensor) -> None:
        self._parts, self._part_of, self._row_of = parts, part_of, row_of
        self.shape = (len(row_of), parts[0].shape[1])
        self.row_bytes = max(part.row_bytes for part in parts)
        self.source = ", ".join(dict.fromkeys(part.source for part in parts))
        self.stored_bits = max(part.stored_bits for part in parts)
        self.quantized = any(part.quantized for part in parts)
        formats = {part.integers for part in parts}
        self.integers = formats.pop() if len(formats) == 1 else None

    def floats(self, rows: Rows) -> Tensor:
        """See `Matrix`."""
        return self._taken(rows, lambda part, at: [part.floats(at)])[0]

    def as_integers(self, rows: Rows) -> Integers:
        """See `Matrix`."""
        if self.integers is None:
            raise ValueError(f"{self.source} has no format of the kernels")
        whole: list[Integers] = []

        def read(part: GGUFMatrix, at: Tensor) -> list[Tensor]:
            whole.append(part.as_integers(at))
            found = whole[-1].values, whole[-1].scales, whole[-1].second
            return [tensor for tensor in found if tensor is not None]

        values, scales, *second = self._taken(rows, read)
        minima, zeros = (
            second[0] if second and getattr(whole[0], kind) is not None else None
            for kind in ("minima", "zeros")
        )
        return Integers(values, scales, minima, zeros)

    def _taken(
        self, rows: Rows, read: Callable[[GGUFMatrix, Tensor], list[Tensor]]
    ) -> list[Tensor]:
        """What `read` gives of some rows of each part, in the order of `rows`."""
        numbers = row_numbers(rows, self.shape[0])
        part_of, row_of = self._part_of[numbers], self._row_of[numbers]
        places = [(part_of == number).nonzero().flatten() for number in range(len(self._parts))]
        read_of = [
            (at, read(part, row_of[at]))
            for part, at in zip(self._parts, places, strict=True)
            if len(at)
        ]
        found = []
        for tensors in zip(*(tensors for _, tensors in read_of), strict=True):
            dtype = tensors[0].dtype
            for tensor in tensors[1:]:
                dtype = torch.promote_types(dtype, tensor.dtype)
            out = torch.empty((len(numbers), tensors[0].shape[1]), dtype=dtype)
            for (at, _), tensor in zip(read_of, tensors, strict=True):
                out[at] = tensor.to(dtype)
            found.append(out)
        return found
