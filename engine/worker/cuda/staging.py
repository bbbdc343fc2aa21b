"""A step's inputs go to the device in one copy, and its results come back beside the next step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGN = 16
"""Bytes: what kernels may load at once."""


def send(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays on the device, by one copy that isn't waited for.

    They lie side by side in one allocation, there as on the host. On the host it is pinned, and
    torch keeps it until the copy is done; no buffer of ours can be overwritten too early.
    """
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += -(-array.nbytes // _ALIGN) * _ALIGN
    host = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    flat = host.numpy()
    for array, start in zip(arrays, starts, strict=True):
        part = flat[start : start + array.nbytes]
        part.view(array.dtype)[:] = array.ravel()
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_dtype(array)).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def _dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


class Download:
    """Tensors on their way to the host, on a stream of their own."""

    def __init__(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream | None) -> None:
        self._host: list[Tensor] = list(tensors)
        self._done: torch.cuda.Event | None = None
        if stream is None:
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._host = []
            for tensor in tensors:
                # Lest its memory be given to the next step while it's being copied.
                tensor.record_stream(stream)
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._host.append(host.copy_(tensor, non_blocking=True))
            self._done = torch.cuda.Event()
            self._done.record(stream)

    def wait(self) -> list[Tensor]:
        """They, on the host."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


def copies(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for `Download`; None where the host sees the device's memory anyway."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None
