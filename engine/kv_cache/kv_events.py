"""KV events: changes of the prefix cache, in vLLM's message format.

Consumers are routers that track which replica holds which prefix. As in vLLM, a block is named by
the last 64 bits of its hash; the engine never looks blocks up by them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.kv_cache.kv_cache_config import KVCacheKind

#: vLLM's name of the KV cache on the device, whatever the device is.
MEDIUM = "GPU"


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """The event's name, then its fields in order."""


class BlockStored(KVCacheEvent):
    """Consecutive blocks of a prompt were cached.

    Attributes:
        block_hashes: of the blocks, in the prompt's order.
        parent_block_hash: of the block before them; None: they are the prompt's first.
        token_ids: of all blocks.
        block_size: tokens per block.
        lora_id: None; adapters have names.
        medium: where the blocks are stored.
        lora_name: the adapter's name as the client gave it; None: no adapter.
        extra_keys: None; they would reveal tenants' secrets.
        group_idx: KV cache group; None: there is only one.
        kv_cache_spec_kind: attention type of the group's layers.
        kv_cache_spec_sliding_window: number of tokens that they attend to; None: all.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    extra_keys: None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks were removed from the cache. Attributes: see `BlockStored`."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    """All blocks were removed from the cache."""


class KVEventBatch(msgspec.Struct, array_like=True):
    """The changes since the previous batch.

    Attributes:
        ts: seconds since 1970.
        events: in order.
        data_parallel_rank: 0; each replica has its own endpoint.
    """

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int = 0


#: vLLM's names of attention types.
_SPEC_KINDS: dict[KVCacheKind, str] = {"full": "full_attention", "window": "sliding_window"}


class KVEventGroup(msgspec.Struct, frozen=True):
    """A KV cache group whose blocks hold tokens.

    Attributes:
        index: index of the group; None: it's the only one.
        kind: attention type of its layers.
        window: number of tokens that they attend to; 0: all.
    """

    index: int | None
    kind: KVCacheKind
    window: int


class KVEventRecorder:
    """Collects events. Of blocks with equal content, the first is stored and the last removed."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        #: Groups of the stored blocks by their keys in the pool.
        self._stored: dict[bytes, KVEventGroup] = {}

    def is_stored(self, key: bytes) -> bool:
        """Whether the last event of a block said that it is cached."""
        return key in self._stored

    def record_stored(
        self,
        hashes: Sequence[bytes],
        suffix: bytes,
        indices: Sequence[int],
        token_ids: Sequence[int],
        group: KVEventGroup,
        lora_name: str | None,
    ) -> None:
        """Record that blocks `indices` of a sequence with these hashes and tokens were cached.

        `suffix`: of the KV cache group's keys in the pool.
        """
        size, run_start = self._block_size, 0
        for position, index in enumerate(indices):
            self._stored[hashes[index] + suffix] = group
            is_last = position + 1 == len(indices)
            if not is_last and indices[position + 1] == index + 1:
                continue
            first, run_start = indices[run_start], position + 1
            event = BlockStored(
                [_short_hash(block_hash) for block_hash in hashes[first : index + 1]],
                _short_hash(hashes[first - 1]) if first else None,
                list(token_ids[first * size : (index + 1) * size]),
                size,
                None,
                MEDIUM,
                lora_name,
            )
            if group.index is not None:
                event.group_idx = group.index
                event.kv_cache_spec_kind = _SPEC_KINDS[group.kind]
                event.kv_cache_spec_sliding_window = group.window or None
            self._events.append(event)

    def record_removed(self, key: bytes) -> None:
        """Record that no block is cached under a key of the pool any more."""
        group = self._stored.pop(key, None)
        if group is None:
            return  # the block of a state
        suffix_length = 0 if group.index is None else 2
        short_hash = _short_hash(key[: len(key) - suffix_length])
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group.index:
            last.block_hashes.append(short_hash)
        else:
            self._events.append(BlockRemoved([short_hash], MEDIUM, group.index))

    def record_cleared(self) -> None:
        """Record that nothing is cached any more."""
        self._stored.clear()
        self._events.append(AllBlocksCleared())

    def pop_events(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Return and clear the events since the last call."""
        events, self._events = self._events, []
        return events


def _short_hash(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")
