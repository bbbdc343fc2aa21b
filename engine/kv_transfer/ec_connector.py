"""`ECConnector`: outputs of an encoder in the tiers of KV blocks, by vLLM's names."""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.kv_transfer.block_buffers import Payload
from engine.kv_transfer.host_tier import HostTier
from engine.kv_transfer.storage_queue import READ_TIMEOUT_S, StorageQueue

#: Before an output's bytes: its rows, its columns, and its dtype.
_HEADER = struct.Struct("<II16s")


class ECConnector:
    """Saves what an encoder makes of a picture or of sound, and loads what any replica has saved.

    An output is cut into payloads as long as those of KV blocks, so that it is stored, verified,
    encrypted, counted and evicted as they are.
    """

    def __init__(
        self,
        host: HostTier,
        storage: StorageQueue | None,
        numerics: bytes,
        block_bytes: int,
        device: torch.device,
        *,
        saves: bool,
        loads: bool,
    ) -> None:
        """
        Args:
            host: where outputs are read from.
            storage: where saved outputs are written behind, and read ahead from; None: `host`.
            numerics: digest of the model and of all else that decides an output's bytes but for
                what the encoder reads.
            block_bytes: bytes of a payload.
            device: where outputs are.
            saves: whether outputs are saved.
            loads: whether outputs are loaded.
        """
        self._host, self._storage = host, storage
        self._numerics, self._block_bytes, self._device = numerics, block_bytes, device
        self._saves, self._loads = saves, loads
        #: Number of outputs that were loaded.
        self.num_loaded = 0

    def start_read_ahead(
        self,
        keys: Sequence[bytes],
        tenant: str,
        namespace: str,
        source: str = "",
        *,
        refresh: bool = False,
    ) -> list[Future[None]]:
        """Read outputs of a request's items where `start_load_caches` finds them. `source`: see
        `StorageTier.read_sequence`; `refresh`: another replica has just written them.
        """
        storage = self._storage
        if storage is None or not self._loads or storage.hangs:
            return []
        readings: list[Future[None]] = []
        for first in map(self._first_key, dict.fromkeys(keys)):
            missing: list[bytes] = [first]
            more: Callable[[Payload], Sequence[bytes]] | None = None
            if (payload := self._host.get(first)) is None:
                more = partial(self._keys_after, first)
            else:
                missing = [key for key in self._keys_after(first, payload) if key not in self._host]
            if missing and (source or refresh or storage.tier.may_contain(missing[0])):
                reading = storage.read_ahead(
                    missing,
                    tenant,
                    namespace,
                    READ_TIMEOUT_S,
                    source=source,
                    refresh=refresh,
                    more=more,
                )
                readings.append(reading)
        return readings

    def start_load_caches(self, key: bytes) -> Tensor | None:
        """The output [num_vectors, hidden] of an item as it was saved; None: there is none."""
        first = self._first_key(key)
        if not self._loads or (payload := self._host.get(first)) is None:
            return None
        payloads, following = [payload], self._keys_after(first, payload)
        for following_key in following:
            if (payload := self._host.get(following_key)) is None:
                return None
            payloads.append(payload)
        self._host.touch([first, *following])
        num_rows, width, name = _HEADER.unpack_from(payloads[0].data)
        dtype = getattr(torch, name.rstrip(b"\0").decode())
        size = num_rows * width * dtype.itemsize
        raw = torch.from_numpy(np.concatenate(payloads)[_HEADER.size :][:size].copy())
        self.num_loaded += 1
        return raw.view(dtype).view(num_rows, width).to(self._device)

    def save_caches(self, key: bytes, output: Tensor, tenant: str, namespace: str) -> None:
        """Save an item's output [num_vectors, hidden], for a tenant's cache namespace."""
        if not self._saves:
            return
        first = self._first_key(key)
        name = str(output.dtype).removeprefix("torch.").encode()
        header = np.frombuffer(_HEADER.pack(*output.shape, name), np.uint8)
        keys = [first, *self._keys_after(first, header)]
        tier = self._host if self._storage is None else self._storage
        # A part may have been evicted.
        if all(key in tier for key in keys):
            return
        content: np.ndarray = output.detach().cpu().contiguous().view(torch.uint8).numpy().ravel()
        padding = np.zeros(-(len(header) + len(content)) % self._block_bytes, np.uint8)
        payloads = np.concatenate([header, content, padding]).reshape(-1, self._block_bytes)
        # Copies, because each is evicted by itself.
        blocks = [(key, payload.copy()) for key, payload in zip(keys, payloads, strict=True)]
        self._host.put(blocks, tenant)
        if self._storage is not None:
            new = [block for block in blocks if block[0] not in self._storage]
            self._storage.queue_writes(new, namespace, tenant)

    def reset_cache(self) -> None:
        """Never load again what was saved so far."""
        self._numerics = secrets.token_bytes(32)

    def _first_key(self, key: bytes) -> bytes:
        """Key of an output's first payload."""
        return hashlib.sha256(self._numerics + b"encoder" + key).digest()

    def _keys_after(self, first: bytes, payload: Payload) -> list[bytes]:
        """Keys of an output's other payloads, by the first payload, which begins with a header."""
        num_rows, width, name = _HEADER.unpack_from(payload.data)
        dtype = getattr(torch, name.rstrip(b"\0").decode())
        num_payloads = -(-(_HEADER.size + num_rows * width * dtype.itemsize) // self._block_bytes)
        return [
            hashlib.sha256(first + number.to_bytes(4, "little")).digest()
            for number in range(1, num_payloads)
        ]
