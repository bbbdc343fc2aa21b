"""A file of weights in memory: its pages come when they are read and go when nobody needs them."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch
from torch import Tensor

from engine.contract.errors import ModelLoadError


class MappedFile:
    """Tensors of a file, at offsets in bytes.

    After `release` a tensor's pages are read from the disk anew, so it stays valid; but what was
    written to it is gone: copy it first.
    """

    def __init__(self, path: Path) -> None:
        """Raises `ModelLoadError` when the file can't be mapped."""
        # Writable, because torch has no other tensors; private, so that the file never changes; and
        # the system sets no memory aside for copies of pages.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(
                    file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} can't be read: {error}.", param="model") from error
        self.path = path
        self.size = len(self._map)

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Raises `ModelLoadError` unless the tensor lies within the file."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if offset < 0 or count < 0 or offset + size > self.size:
            raise ModelLoadError(
                f"{self.path}: a tensor of {size} bytes at {offset} lies outside of the file's "
                f"{self.size} bytes.",
                param="model",
            )
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=offset)
        if flat.data_ptr() % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).view(shape)

    @property
    def buffer(self) -> mmap.mmap:
        """The whole file; slices of it are copies."""
        return self._map

    def release(self) -> None:
        """Give the pages that have been read back to the system."""
        self._map.madvise(mmap.MADV_DONTNEED)
