"""Memory that a load works in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor


class Scratch:
    """One buffer, used again for each piece of each layer.

    Taken anew for every piece, some megabytes come from the heap between small things that stay,
    and leave holes that nothing fits into: a load of 32-bit weights ended a quarter larger.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def joined(self, pieces: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
        """`pieces` [n, K] over each other, until the next call.

        In `dtype`, by default one that holds all of them, but for 64 bits, which no kernel takes.

        What is one piece of that dtype already, or isn't in the CPU's memory, isn't copied here.
        """
        only = len(pieces) == 1
        dtype = dtype or reduce(torch.promote_types, (piece.dtype for piece in pieces))
        dtype = torch.float32 if dtype == torch.float64 else dtype
        if any(piece.device != self._bytes.device for piece in pieces):
            return pieces[0] if only else torch.cat(list(pieces))
        if only and pieces[0].dtype == dtype:
            return pieces[0]
        rows = sum(len(piece) for piece in pieces)
        joined = self._room((rows, pieces[0].shape[1]), dtype)
        above = 0
        for piece in pieces:
            joined[above : above + len(piece)].copy_(piece)
            above += len(piece)
        return joined

    def _room(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if len(self._bytes) < size:
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size].view(dtype).view(shape)
