"""A tensor of a GGUF file as a `Matrix`."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.gguf import types
from engine.models.gguf.block_formats import FORMATS, READERS
from engine.models.gguf.reader import TensorInfo
from engine.models.mapped import MappedFile
from engine.quantization.matrix import Plain, Rows
from kernels.interface import Integers

_FLOATS = {types.F32: torch.float32, types.F16: torch.float16, types.BF16: torch.bfloat16}
#: What reading a value of a quantised block takes for a while: integers, floats, copies of both.
_READ_BYTES = 32


class GGUFMatrix(Plain):
    """Rows of a tensor, in an order of our own where `order` (int64 [N]) says so."""

    def __init__(
        self, file: MappedFile, info: TensorInfo, shape: tuple[int, int], order: Tensor | None
    ) -> None:
        block = types.BLOCKS[info.kind]
        self.shape = shape
        self.row_bytes = shape[1] * (_READ_BYTES if info.kind in READERS else block.nbytes)
        self.source = types.name_of(info.kind)
        self.stored_bits = 8 * block.nbytes // block.values
        self.quantized = info.kind in READERS
        self.integers = FORMATS.get(info.kind)
        self._kind, self._order = info.kind, order
        dtype = _FLOATS.get(info.kind)
        if dtype is None:
            blocks = (shape[0], shape[1] // block.values, block.nbytes)
            self._raw = file.tensor(info.offset, torch.uint8, blocks)
        else:
            self._raw = file.tensor(info.offset, dtype, shape)

    def _of(self, rows: Rows) -> Tensor:
        return self._raw[rows if self._order is None else self._order[rows]]

    def floats(self, rows: Rows) -> Tensor:
        """See `Matrix`."""
        raw = self._of(rows)
        return READERS[self._kind](raw).floats() if self.quantized else raw

    def as_integers(self, rows: Rows) -> Integers:
        """See `Matrix`."""
        if self.integers is None:
            raise ValueError(f"{types.name_of(self._kind)} has no format of the kernels")
        return READERS[self._kind](self._of(rows)).integers()
