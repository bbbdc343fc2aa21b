"""`BlockBuffers`: a KV cache's blocks as bytes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.kv_transfer.base import KVCaches

#: A block's keys, values and scales in all layers, one after the other: uint8 [block_bytes].
Payload = np.ndarray


class BlockBuffers:
    """Reads and writes blocks of all layers at once.

    Attributes:
        block_bytes: bytes of a block.
    """

    def __init__(self, kv_caches: KVCaches) -> None:
        # Layers may share a tensor (latents are keys and values), which is copied once.
        tensors = {
            tensor.data_ptr(): tensor for layer in kv_caches.values() for tensor in layer
        }.values()
        self._views = [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in tensors]
        self._sizes = [view.shape[1] for view in self._views]
        self.block_bytes = sum(self._sizes)

    @staticmethod
    def describe(kv_caches: KVCaches) -> list[list[str]]:
        """The caches' layout, for keys of blocks: dtype and shape of a block's part, by layer."""
        return [
            [f"{tensor.dtype}{list(tensor.shape[1:])}" for tensor in layer]
            for layer in kv_caches.values()
        ]

    def read(self, block_id: int) -> Payload:
        """A copy of a block."""
        block: Tensor = torch.cat([view[block_id] for view in self._views])
        payload: Payload = block.cpu().numpy()
        return payload

    def write(self, block_id: int, payload: Payload) -> None:
        """Overwrite a block. The payload must have `block_bytes`."""
        source = torch.from_numpy(payload).to(self._views[0].device)
        for view, part in zip(self._views, source.split(self._sizes), strict=True):
            view[block_id].copy_(part)
