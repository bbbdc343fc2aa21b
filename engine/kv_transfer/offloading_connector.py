"""`OffloadingConnector`: saves KV blocks to host memory and to a storage."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.contract.replica_state import EngineStats
from engine.kv_cache import BlockHashes, KVCacheConfig
from engine.kv_transfer.base import KVCaches, KVConnectorBase, PlanView, RequestView
from engine.kv_transfer.block_buffers import BlockBuffers, Payload, StoredPayload
from engine.kv_transfer.block_keys import BlockKeys, KeyedBlock
from engine.kv_transfer.ec_connector import ECConnector
from engine.kv_transfer.eviction_history import EvictionHistory
from engine.kv_transfer.filled_blocks import FilledBlocks
from engine.kv_transfer.host_tier import HostTier
from engine.kv_transfer.offloading_metadata import (
    OffloadingMetadata,
    PlannedBlock,
    SavedBlocks,
    plan_blocks,
)
from engine.kv_transfer.ranked_storage import RankedStorage
from engine.kv_transfer.read_ahead import ReadAhead
from engine.kv_transfer.storage_queue import StorageQueue, all_done
from engine.kv_transfer.storage_tier import StorageTier

log = logging.getLogger(__name__)

#: Number of measurements, of which the fastest counts: others may have waited for a core.
_NUM_MEASUREMENTS = 3

#: A block to write into the KV cache, and its payloads.
LoadedBlock = tuple[PlannedBlock, list[StoredPayload]]


@dataclass(slots=True)
class _Match:
    """Blocks with which a sequence may start.

    Attributes:
        block_hashes: the sequence's; a beam whose tokens are replaced gets others.
    """

    block_hashes: BlockHashes
    num_computed: int
    num_tokens: int
    blocks: list[tuple[KeyedBlock, list[StoredPayload]]] = field(default_factory=list)


class OffloadingConnector(KVConnectorBase):
    """Saves blocks as they are filled, and those of preempted sequences; loads matching ones.

    Blocks are verified while they are written into the KV cache. If one is invalid, the step isn't
    run, and its sequences compute all their tokens.

    Attributes:
        host, storage: tiers in host memory, and in a storage below it.
        num_matched_tokens: tokens of new sequences that the host tier had.
        num_looked_up_tokens: tokens of new sequences that weren't in the KV cache.
        num_saved_blocks: blocks that were saved.
        num_evicted_tokens: tokens of new sequences that a tier `GHOST_FACTOR` times as large would
            have had (see `EvictionHistory`), and that weren't loaded.
    """

    metadata_type = OffloadingMetadata

    def __init__(
        self,
        host: HostTier,
        block_size: int,
        numerics: bytes,
        layout: KVCacheConfig,
        *,
        storage: StorageQueue | None = None,
        ec_connector: ECConnector | None = None,
        saves: bool,
        loads: bool,
        swaps: bool,
        max_in_flight: int,
        has_other_ranks: bool = False,
        verifies_early: bool = False,
    ) -> None:
        """
        Args:
            host: tier to which blocks are saved.
            block_size: tokens per block.
            numerics: digest of the model and of everything else that determines a block's bytes,
                except its tokens, namespace and adapter.
            layout: the KV cache groups.
            storage: where saved blocks are written in the background, and read ahead from.
            ec_connector: also saves and loads encoder outputs there.
            saves: whether full blocks are saved as they are filled.
            loads: whether blocks are looked up for new sequences.
            swaps: whether all blocks of preempted sequences are saved.
            max_in_flight: number of steps that may run while the next is planned.
            has_other_ranks: whether plans report changes of the host tier to other ranks.
            verifies_early: whether blocks are verified before a step is planned, because other
                processes would have to stop with one that fails.
        """
        self.host, self.storage, self.ec_connector = host, storage, ec_connector
        self._has_other_ranks, self._verifies_early = has_other_ranks, verifies_early
        #: The current or last step, and what steps removed from the tier.
        self._running_step = 0
        self._removed: deque[tuple[int, bytes]] = deque()
        if has_other_ranks:
            host.on_removed = lambda key: self._removed.append((self._running_step, key))
        self._block_size, self._layout = block_size, layout
        self._saves, self._swaps = saves, swaps
        self._max_in_flight = max_in_flight
        self._numerics = hashlib.sha256(numerics).digest()
        self._step = 0
        self._filled = FilledBlocks(layout, block_size)
        self._read_ahead = None if storage is None else ReadAhead(storage, host, block_size)
        #: For each preempted sequence, the number of saved tokens and the step that saves them.
        self._swapped: dict[int, tuple[int, int]] = {}
        self._swap_outs: list[SavedBlocks] = []
        #: The last match, since the head of the queue may be looked up in many steps.
        self._match: _Match | None = None
        self._starting: dict[int, list[LoadedBlock]] = {}
        #: By step, the blocks to write into the KV cache.
        self._loading: deque[tuple[int, list[LoadedBlock]]] = deque()
        self.num_looked_up_tokens = self.num_matched_tokens = self.num_saved_blocks = 0
        self.num_evicted_tokens = 0
        #: Whether loading blocks is faster than computing their tokens: from host memory, and from
        #: the storage.
        self._loads_host = self._loads_storage = loads
        self._saved_s_per_token = 0.0

    @property
    def num_swapped(self) -> int:
        """Number of preempted sequences whose blocks were saved."""
        return len(self._swapped)

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_swapped, swapped_in = self._swapped.get(request.seq_id, (0, 0))
        if not (self._loads_host or num_swapped):
            return 0, False
        if num_swapped and self._step < swapped_in + self._max_in_flight:
            return None, False  # the step that saves them may still be running
        match = self._match
        if (
            match is None
            or match.block_hashes is not request.block_hashes
            or match.num_computed != num_computed_tokens
            or not match.num_tokens
            # Blocks removed since then are still present here, but not on other ranks.
            or self._has_other_ranks
        ):
            match = self._match = self._find(request, num_computed_tokens, num_swapped)
        return match.num_tokens, False

    def start_read_ahead(
        self, request: RequestView, num_computed_tokens: int, needs_encoding: bool = False
    ) -> Future[None] | None:
        readings: list[Future[None]] = []
        if self._read_ahead is not None and self._loads_storage:
            reading = self._read_ahead.start(
                request, num_computed_tokens, needs_encoding, self._keys
            )
            if reading is not None:
                readings.append(reading)
        if self.ec_connector is not None:
            keys = [entry.key for entry in request.media if entry.item.end > num_computed_tokens]
            readings += self.ec_connector.start_read_ahead(
                keys,
                request.tenant,
                request.cache_namespace,
                request.kv_peer,
                refresh=request.prefilled,
            )
        return all_done(readings) if readings else None

    def follow_prefill(self, request: RequestView, num_computed_tokens: int) -> None:
        if self._read_ahead is not None and self._loads_storage:
            self._read_ahead.follow(request, num_computed_tokens, self._keys)

    def stop_following(self, request_id: str) -> None:
        if self.storage is not None:
            self.storage.stop_following(request_id)

    def _find(self, request: RequestView, num_computed: int, num_swapped: int) -> _Match:
        """The longest run of blocks after a sequence's first `num_computed` tokens."""
        size, token_ids = self._block_size, request.token_ids
        hashes = request.block_hashes.hash_full_blocks(token_ids, size)
        if num_computed < num_swapped < len(token_ids):
            match = self._load(request, num_computed, num_swapped)
            if match.num_tokens:
                return match
        first, end = num_computed // size, (len(token_ids) - 1) // size
        while num_blocks := self._keys.longest_hit(hashes[first:end], self.host.__contains__):
            match = self._load(request, num_computed, num_computed + num_blocks * size)
            if match.num_tokens:
                return match
        return _Match(request.block_hashes, num_computed, 0)

    def _load(self, request: RequestView, num_computed: int, num_tokens: int) -> _Match:
        """The blocks of a sequence's tokens after the computed ones; [] unless all are in host
        memory.
        """
        keyed = self._keys.blocks_of(request, num_computed, num_tokens)
        blocks = self._read_host(keyed, verify=self._verifies_early)
        num_loaded = num_tokens - num_computed if blocks else 0
        return _Match(request.block_hashes, num_computed, num_loaded, blocks)

    def _read_host(
        self, keyed: Sequence[KeyedBlock], *, verify: bool
    ) -> list[tuple[KeyedBlock, list[StoredPayload]]]:
        """Blocks with their payloads; [] unless all are in host memory. `verify`: and unchanged."""
        read = self.host.read_verified if verify else self.host.read
        blocks = []
        for block in keyed:
            payloads = [payload for key in block.keys if (payload := read(key)) is not None]
            if len(payloads) < len(block.keys):
                return []
            blocks.append((block, payloads))
        self.host.touch([key for block, _ in blocks for key in block.keys])
        return blocks

    def load_encoder_states(self, request: RequestView, block_ids: list[list[int]]) -> bool:
        if not (self._loads_host or request.seq_id in self._swapped):
            return False
        # Verified now: a sequence without loaded tokens isn't run again after a step has failed.
        blocks = self._read_host(self._keys.encoder_blocks(request), verify=True)
        self._load_later(request, block_ids, blocks)
        return bool(blocks)

    def _load_later(
        self,
        request: RequestView,
        block_ids: list[list[int]],
        blocks: Sequence[tuple[KeyedBlock, list[StoredPayload]]],
    ) -> None:
        """Have the step that starts a request write blocks into the KV cache."""
        self._starting.setdefault(request.seq_id, []).extend(
            ((block.group, block_ids[block.group][block.position], block.keys), payloads)
            for block, payloads in blocks
        )

    def update_state_after_alloc(
        self, request: RequestView, block_ids: list[list[int]], num_external_tokens: int
    ) -> None:
        is_swapped = self._swapped.pop(request.seq_id, None) is not None
        if not is_swapped:
            num_cached = request.num_computed_tokens - num_external_tokens
            self.num_looked_up_tokens += len(request.token_ids) - num_cached
            self.num_evicted_tokens += self._count_evicted(request)
        match, self._match = self._match, None
        if num_external_tokens and match is not None:
            self._load_later(request, block_ids, match.blocks)
            if not is_swapped:
                self.num_matched_tokens += num_external_tokens

    def _count_evicted(self, request: RequestView) -> int:
        """Number of tokens after a sequence's computed ones whose blocks the tier has evicted."""
        size, token_ids = self._block_size, request.token_ids
        hashes = request.block_hashes.hash_full_blocks(token_ids, size)
        hashes = hashes[request.num_computed_tokens // size : (len(token_ids) - 1) // size]
        num_saved = self._keys.longest_hit(hashes, self._history.__contains__)
        num_present = self._keys.longest_hit(hashes[:num_saved], self._tier.__contains__)
        return (num_saved - num_present) * size

    def build_connector_meta(
        self, plan: PlanView, scheduled: Sequence[RequestView]
    ) -> OffloadingMetadata | None:
        self._step = plan.step
        self._filled.apply(plan)
        loading = [block for new in plan.new for block in self._starting.get(new.seq_id, ())]
        self._starting.clear()
        while self._loading and self._loading[0][0] < plan.step - self._max_in_flight:
            self._loading.popleft()  # of a step that wasn't run
        if loading:
            self._loading.append((plan.step, loading))
        swapped, self._swap_outs = self._swap_outs, []
        saves = self._filled_blocks(plan, scheduled) if self._saves else []
        ranked = self.storage if isinstance(self.storage, RankedStorage) else None
        num_calls = 0 if ranked is None else ranked.num_calls  # before what they read is looked up
        removed = self._pop_removed(plan.step, ranked)
        if not (loading or swapped or saves or removed):
            return None
        loads = [block for block, _ in loading] if self._has_other_ranks else []
        return OffloadingMetadata(plan.step, swapped, saves, loads, removed, num_calls)

    def _pop_removed(self, step: int, ranked: RankedStorage | None) -> list[tuple[int, bytes]]:
        """The keys that the plan of `step` must remove on other ranks. A running step may still
        save again what was removed.
        """
        removed = []
        while self._removed and self._removed[0][0] < step - self._max_in_flight:
            entry = self._removed.popleft()
            # In this order: what was read is in host memory.
            is_being_read = ranked is not None and ranked.is_being_read(entry[1])
            if not is_being_read and entry[1] not in self.host:
                removed.append(entry)
        return removed

    def _filled_blocks(self, plan: PlanView, scheduled: Sequence[RequestView]) -> list[SavedBlocks]:
        """The blocks that a step fills, and the states that it saves, which no tier has yet."""
        saves = []
        for tenant, namespace, blocks in self._filled.in_step(plan, scheduled, self._keys):
            self._history.record(key for _, _, keys in blocks for key in keys)
            new = [block for block in blocks if not all(key in self._tier for key in block[2])]
            if new:
                saves.append((tenant, namespace, new[: self._max_blocks]))
        return saves

    @property
    def _tier(self) -> HostTier | StorageQueue:
        """The tier to which filled blocks are saved."""
        return self.host if self.storage is None else self.storage

    def request_preempted(self, request: RequestView, block_ids: list[list[int]]) -> None:
        token_ids = request.token_ids
        # With a step in flight, the last tokens may not be known yet.
        num_tokens = min(request.num_computed_tokens, len(token_ids))
        if not self._swaps or num_tokens <= 0:
            return
        if self._layout.state_group is not None and num_tokens < request.num_computed_tokens:
            return  # the state includes a token that isn't known yet
        keyed = self._keys.blocks_of(request, 0, num_tokens)
        keyed += self._keys.encoder_blocks(request)
        blocks = plan_blocks(keyed, block_ids)[: self._max_blocks]
        self._swap_outs.append((request.tenant, request.cache_namespace, blocks))
        self._swapped[request.seq_id] = (num_tokens, self._step + 1)

    def request_finished(
        self, request: RequestView, block_ids: list[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._swapped.pop(request.seq_id, None)
        size, storage = self._block_size, self.storage
        num_blocks = min(request.num_computed_tokens, len(request.token_ids)) // size
        if storage is not None and storage.tier.address and num_blocks:
            blocks = self._keys.blocks_of(request, 0, num_blocks * size)
            storage.tier.lease([key for block in blocks for key in block.keys])
        return False, None

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        self._buffers = BlockBuffers(kv_caches, self._layout)
        groups = [
            [group.kind, group.layers, group.window, group.encoder_length]
            for group in self._layout.groups
        ]
        layout = [self._block_size, BlockBuffers.describe(kv_caches), groups]
        self._layout_digest = hashlib.sha256(msgspec.json.encode(layout)).digest()
        block_bytes = self._buffers.block_bytes
        num_blocks = self.host.capacity // block_bytes
        if (storage := self.storage) is not None:
            num_blocks = storage.tier.capacity // (block_bytes * storage.num_parts)
        self._history = EvictionHistory(num_blocks)
        #: That host memory holds.
        self._max_blocks = self.host.capacity // block_bytes
        if self._read_ahead is not None:
            self._read_ahead.max_blocks = self._max_blocks
        self._make_keys()

    def _make_keys(self) -> None:
        self._keys = BlockKeys(
            self._numerics + self._layout_digest,
            self._layout,
            self._block_size,
            self._buffers.num_payloads,
        )

    def start_load_kv(self, forward_context: Any = None, **kwargs: Any) -> None:
        metadata = self._metadata
        if not isinstance(metadata, OffloadingMetadata):
            return
        self._running_step = metadata.step
        # Done first: blocks loaded next may reuse those of preempted sequences.
        for tenant, _, blocks in metadata.swapped:
            self._save(blocks, tenant, self.host.__contains__)
        while self._loading and self._loading[0][0] <= metadata.step:
            step, loads = self._loading.popleft()
            if step == metadata.step:
                self._load_verified(loads)

    def _load_verified(self, loads: Sequence[LoadedBlock]) -> None:
        """Write blocks into the KV cache. Raises `LookupError` if any has changed since it was
        stored.
        """
        num_changed = 0
        for (group, block_id, keys), payloads in loads:
            if not self._buffers.write_verified(group, block_id, payloads):
                num_changed += 1
                self.host.discard_changed(keys)
        if num_changed:
            raise LookupError(f"{num_changed} blocks have changed in host memory")

    def _save(
        self, blocks: list[PlannedBlock], tenant: str, is_saved: Callable[[bytes], bool]
    ) -> list[tuple[bytes, Payload]]:
        """Save the blocks of a sequence whose keys aren't all saved."""
        payloads = [
            (key, payload)
            for group, block_id, keys in blocks
            if not all(map(is_saved, keys))
            for key, payload in zip(keys, self._buffers.read(group, block_id), strict=True)
        ]
        self.host.put(payloads, tenant)
        self.num_saved_blocks += len(payloads)
        return payloads

    def wait_for_save(self) -> None:
        metadata = self._metadata
        if isinstance(metadata, OffloadingMetadata):
            storage = self.storage
            is_saved = self.host.__contains__ if storage is None else storage.is_saved
            for tenant, namespace, blocks in metadata.saves:
                payloads = self._save(blocks, tenant, is_saved)
                if storage is not None:
                    storage.queue_writes(payloads, namespace, tenant)
            if isinstance(storage, RankedStorage):
                storage.saved_step = metadata.step

    def find_tier(self, block_hash: bytes) -> str:
        return self._tier_name if self._keys.first_key(block_hash) in self._tier else ""

    def has_in_memory(self, block_hash: bytes) -> bool:
        return self._loads_host and any(
            key in self.host for key in self._keys.first_keys(block_hash)
        )

    @property
    def _tier_name(self) -> str:
        return self.host.name if self.storage is None else self.storage.tier.name

    @property
    def key_space(self) -> str:
        if self.storage is None or not (digest := self.storage.tier.digest):
            return ""
        return hashlib.sha256(digest + self._numerics + self._layout_digest).hexdigest()

    @property
    def address(self) -> str:
        return "" if self.storage is None else self.storage.tier.address

    def wait_until_saved(self, timeout_s: float) -> None:
        if self.storage is not None:
            try:
                self.storage.flush(timeout_s)
            except TimeoutError:
                log.warning("KV blocks weren't written in time; others may compute them again")

    def fill_stats(self, stats: EngineStats) -> None:
        host = self.host
        stats.num_requests_swapped = self.num_swapped
        stats.cpu_cache_usage_perc = host.used_bytes / max(1, host.capacity)
        stats.external_prefix_cache_queries_total = self.num_looked_up_tokens
        stats.external_prefix_cache_hits_total = self.num_matched_tokens
        stats.kv_tier_saved_blocks_total = self.num_saved_blocks
        if self.ec_connector is not None:
            stats.mm_cache_hits_total += self.ec_connector.num_loaded
        tiers: list[HostTier | StorageTier] = [host]
        if self.storage is not None:
            tiers.append(self.storage.tier)
        stats.kv_tier_bytes = {tier.name: tier.used_bytes for tier in tiers}
        stats.kv_tier_capacity_bytes = {tier.name: tier.capacity for tier in tiers}
        failures = Counter[str]() if self.storage is None else self.storage.failures
        stats.kv_tier_failures_total = dict(host.failures + failures)
        stats.kv_tier_hit_tokens_total = {self._tier_name: self.num_matched_tokens}
        stats.kv_tier_evicted_tokens_total = {self._tier_name: self.num_evicted_tokens}
        stats.kv_tier_saved_seconds_total = {
            self._tier_name: self.num_matched_tokens * self._saved_s_per_token
        }

    def set_prefill_pace(self, seconds_per_token: float) -> None:
        compute_s = self._block_size * seconds_per_token
        if self._read_ahead is not None:
            self._read_ahead.compute_s = compute_s
        load_s = min(self._buffers.measure_write() for _ in range(_NUM_MEASUREMENTS))
        read_s = 0.0
        if self.storage is not None:
            tier = self.storage.tier
            read_s = min(tier.measure_read() for _ in range(_NUM_MEASUREMENTS))
            read_s *= len(self._buffers.growing_groups)
        self._saved_s_per_token = max(0.0, compute_s - load_s - read_s) / self._block_size
        if self._saves:
            self._loads_host = self._loads_host and load_s < compute_s
            self._loads_storage = self._loads_storage and load_s + read_s < compute_s
        # Otherwise it is a consumer: other replicas compute prompts so that this one needn't.
        log.info(
            "KV blocks: %.2f ms to compute, %.2f ms to load, %.2f ms to read from storage",
            1000 * compute_s, 1000 * load_s, 1000 * read_s,
        )  # fmt: skip

    def reset_cache(self) -> None:
        # For instance blocks of other weights, which other replicas may have stored.
        self._numerics = secrets.token_bytes(32)
        self._make_keys()
        self._match = None
        self._history.clear()
        self.host.clear()
        self.reset_encoder_cache()

    def reset_encoder_cache(self) -> None:
        if self.ec_connector is not None:
            self.ec_connector.reset_cache()

    def shutdown(self) -> None:
        if self.storage is not None:
            self.storage.close()
        self.host.clear()
