"""`BlockBuffers`: a KV cache's blocks as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.kv_cache.kv_cache_config import KVCacheConfig
from engine.kv_transfer.base import KVCaches

#: A block's keys, values and scales in all layers of its group, one after the other, or a part of a
#: state: uint8 [block_bytes].
Payload = np.ndarray


class BlockBuffers:
    """Reads and writes blocks of all layers of a KV cache group at once.

    All payloads have the same length, so that storages need know only one: those of groups with
    fewer layers end with zeros, and a block that is larger, as a state is, has several.

    Attributes:
        block_bytes: bytes of a payload.
        num_payloads: payloads of a block, by group.
    """

    def __init__(self, kv_caches: KVCaches, layout: KVCacheConfig) -> None:
        layers = list(kv_caches.values())
        # Layers may share a tensor (latents are keys and values), which is copied once.
        tensors = [
            {
                tensor.data_ptr(): tensor
                for index in ([-1] if group.kind == "state" else group.layers)
                for tensor in layers[index]
            }.values()
            for group in layout.groups
        ]
        self._views = [
            [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in of_group]
            for of_group in tensors
        ]
        self._sizes = [[view.shape[1] for view in views] for views in self._views]
        sizes = [sum(of_group) for of_group in self._sizes]
        attending = [
            size
            for size, group in zip(sizes, layout.groups, strict=True)
            if group.kind != "state" and size
        ]
        self.block_bytes = max(attending or sizes)
        self.num_payloads = [-(-size // self.block_bytes) for size in sizes]

    @staticmethod
    def describe(kv_caches: KVCaches) -> list[list[str]]:
        """The caches' layout, for keys of blocks: dtype and shape of a block's part, by layer."""
        return [
            [f"{tensor.dtype}{list(tensor.shape[1:])}" for tensor in layer]
            for layer in kv_caches.values()
        ]

    def read(self, group: int, block_id: int) -> list[Payload]:
        """A copy of a block."""
        views = self._views[group]
        length, num_payloads = self.block_bytes, self.num_payloads[group]
        padding = num_payloads * length - sum(self._sizes[group])
        # On a GPU the number of tokens of a state is in host memory.
        parts = [view[block_id].to(views[0].device) for view in views]
        if padding:
            parts.append(views[0].new_zeros(padding))
        block: np.ndarray = torch.cat(parts).cpu().numpy()
        if num_payloads == 1:
            return [block]
        # Copies, because each is evicted by itself.
        return [payload.copy() for payload in block.reshape(num_payloads, length)]

    def write(self, group: int, block_id: int, payloads: Sequence[Payload]) -> None:
        """Overwrite a block by its payloads."""
        block = payloads[0] if len(payloads) == 1 else np.concatenate(payloads)
        views, sizes = self._views[group], self._sizes[group]
        source = torch.from_numpy(block[: sum(sizes)]).to(views[0].device)
        for view, part in zip(views, source.split(sizes), strict=True):
            view[block_id].copy_(part)
