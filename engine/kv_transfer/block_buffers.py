"""`BlockBuffers`: a KV cache's blocks as bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from engine.kv_cache.kv_cache_config import KVCacheConfig
from engine.kv_transfer.base import KVCaches

#: A block's keys, values and scales in all layers of its group, one after the other, or a part of a
#: state: uint8 [block_bytes].
Payload = np.ndarray


class StoredPayload(NamedTuple):
    """A payload in host memory.

    Attributes:
        payload: its bytes.
        seed: of the checksum.
        checksum: XXH3-128 of the payload when it was stored.
    """

    payload: Payload
    seed: int
    checksum: int

    @staticmethod
    def checksum_of(payload: Payload, seed: int) -> int:
        """XXH3-128 of a payload."""
        return xxhash.xxh3_128_intdigest(payload.data, seed)

    @property
    def is_unchanged(self) -> bool:
        return self.checksum_of(self.payload, self.seed) == self.checksum


class BlockBuffers:
    """Reads and writes blocks of all layers of a KV cache group at once.

    All payloads have the same length, so that storages need know only one: those of groups with
    fewer layers end with zeros, and a block that is larger, as a state is, has several.

    Attributes:
        block_bytes: bytes of a payload.
        num_payloads: payloads of a block, by group.
        growing_groups: those whose blocks tokens fill. A state is loaded once, so it counts only
            where no layer attends; an encoder's states don't grow.
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
        #: Payloads of a GPU are in pinned memory: others are copied through a pinned buffer.
        self._pins = any(tensor.is_cuda for layer in layers for tensor in layer)
        sizes = [sum(of_group) for of_group in self._sizes]
        attending = [
            size
            for size, group in zip(sizes, layout.groups, strict=True)
            if group.kind != "state" and size
        ]
        self.block_bytes = max(attending or sizes)
        self.num_payloads = [-(-size // self.block_bytes) for size in sizes]
        growing = [
            index
            for index, group in enumerate(layout.groups)
            if group.layers and group.kind != "cross"
        ]
        self.growing_groups = growing or [len(layout.groups) - 1]

    @property
    def host_block_bytes(self) -> int:
        """Bytes of host memory that a payload takes: torch pins a power of two."""
        return 1 << (self.block_bytes - 1).bit_length() if self._pins else self.block_bytes

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
        joined = torch.cat(parts)
        if self._pins:
            joined = torch.empty(joined.shape, dtype=torch.uint8, pin_memory=True).copy_(joined)
        block: np.ndarray = joined.cpu().numpy()
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

    def write_verified(self, group: int, block_id: int, payloads: Sequence[StoredPayload]) -> bool:
        """Overwrite a block by its payloads; whether these are unchanged. If they aren't, what the
        block has now is useless.

        Each layer's part is copied right after it was read for the checksum, while it is in the
        processor's cache.
        """
        views = self._views[group]
        if len(payloads) > 1 or views[0].device.type != "cpu":
            if not all(stored.is_unchanged for stored in payloads):
                return False
            self.write(group, block_id, [stored.payload for stored in payloads])
            return True
        [(payload, seed, expected)] = payloads
        if payload.nbytes != self.block_bytes:
            return False
        checksum, start = xxhash.xxh3_128(seed=seed), 0
        for view, size in zip(views, self._sizes[group], strict=True):
            part = payload[start : start + size]
            checksum.update(part.data)
            view[block_id].copy_(torch.from_numpy(part))
            start += size
        checksum.update(payload[start:].data)
        return bool(checksum.intdigest() == expected)

    def measure_write(self) -> float:
        """Seconds that writing the blocks of as many tokens takes; none may be in use yet."""
        started = time.perf_counter()
        for group in self.growing_groups:
            self.write(group, 0, self.read(group, 0))
        return time.perf_counter() - started
