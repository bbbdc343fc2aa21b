"""`OffloadingConnector`: saves KV blocks to host memory and to a storage."""

from __future__ import annotations

import functools
import hashlib
import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.contract.replica_state import EngineStats
from engine.kv_cache import BlockHashes, KVCacheConfig
from engine.kv_transfer.base import (
    KVCaches,
    KVConnectorBase,
    KVConnectorMetadata,
    PlanView,
    RequestView,
)
from engine.kv_transfer.block_buffers import BlockBuffers, Payload
from engine.kv_transfer.block_keys import BlockKeys, KeyedBlock
from engine.kv_transfer.ec_connector import ECConnector
from engine.kv_transfer.host_tier import HostTier
from engine.kv_transfer.storage_queue import READ_TIMEOUT_S, StorageQueue, all_done

log = logging.getLogger(__name__)

#: How long a reader's thread may have to wait for a core on a busy machine.
_MIN_READ_S = 0.5

#: Evicted blocks are remembered up to this many times the tier's capacity.
GHOST_FACTOR = 4

#: Number of measurements, of which the fastest counts: others may have waited for a core.
_NUM_MEASUREMENTS = 3

#: A block of a plan: its KV cache group, its id there, and its keys in the tiers.
PlannedBlock = tuple[int, int, list[bytes]]
#: A sequence's tenant, its cache namespace, and blocks of it.
SavedBlocks = tuple[str, str, list[PlannedBlock]]
#: A block to write into the KV cache, and its payloads.
LoadedBlock = tuple[PlannedBlock, list[Payload]]


class OffloadingMetadata(KVConnectorMetadata):
    """Attributes:
    step: number of the step whose blocks to load; the connector has them.
    swapped: blocks of preempted sequences, to save before the forward pass.
    saves: blocks that the step fills.
    loads: the blocks to load, for other ranks.
    removed: steps, and the keys that they removed from the tier, for other ranks.
    """

    step: int
    swapped: list[SavedBlocks] = msgspec.field(default_factory=list)
    saves: list[SavedBlocks] = msgspec.field(default_factory=list)
    loads: list[PlannedBlock] = msgspec.field(default_factory=list)
    removed: list[tuple[int, bytes]] = msgspec.field(default_factory=list)


@dataclass(slots=True)
class _Tracked:
    """A running sequence: its block ids by group, its computed tokens before the next step, and the
    number of its first blocks that are saved.
    """

    block_ids: list[list[int]]
    num_computed: int
    num_saved: int = 0


@dataclass(slots=True)
class _Match:
    """Verified blocks with which a sequence may start.

    Attributes:
        block_hashes: the sequence's; a beam whose tokens are replaced gets others.
    """

    block_hashes: BlockHashes
    num_computed: int
    num_tokens: int
    blocks: list[tuple[KeyedBlock, list[Payload]]] = field(default_factory=list)


class OffloadingConnector(KVConnectorBase):
    """Saves blocks as they are filled, and those of preempted sequences; loads matching ones.

    Blocks are verified before any are allocated to a sequence, so an invalid block only shortens
    the prefix.

    Attributes:
        host, storage: tiers in host memory, and in a storage below it.
        num_matched_tokens: tokens of new sequences that were loaded.
        num_looked_up_tokens: tokens of new sequences that weren't in the KV cache.
        num_saved_blocks: blocks that were saved.
        num_evicted_tokens: tokens of new sequences that a tier `GHOST_FACTOR` times as large would
            have had, and that weren't loaded.
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
        """
        self.host, self.storage, self.ec_connector = host, storage, ec_connector
        self._has_other_ranks = has_other_ranks
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
        self._tracked: dict[int, _Tracked] = {}
        #: Of preempted sequences: number of saved tokens, and the step that saves them.
        self._swapped: dict[int, tuple[int, int]] = {}
        self._swap_outs: list[SavedBlocks] = []
        #: The last match, since the head of the queue may be looked up in many steps.
        self._match: _Match | None = None
        self._starting: dict[int, list[LoadedBlock]] = {}
        #: By step, the blocks to write into the KV cache.
        self._loading: deque[tuple[int, list[LoadedBlock]]] = deque()
        self.num_looked_up_tokens = self.num_matched_tokens = self.num_saved_blocks = 0
        self.num_evicted_tokens = 0
        #: Keys that were saved, whether or not the tier still has them; the last saved last.
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        #: Whether loading blocks is faster than computing their tokens: from host memory, and from
        #: the storage.
        self._loads_host = self._loads_storage = loads
        self._saved_s_per_token = 0.0
        #: Seconds that computing a block takes; unknown at first.
        self._compute_s = READ_TIMEOUT_S

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
        reading = self._read_blocks_ahead(request, num_computed_tokens, needs_encoding)
        if reading is not None:
            readings.append(reading)
        if self.ec_connector is not None:
            keys = [entry.key for entry in request.media if entry.item.end > num_computed_tokens]
            readings += self.ec_connector.start_read_ahead(
                keys, request.tenant, request.cache_namespace
            )
        return all_done(readings) if readings else None

    def _read_blocks_ahead(
        self, request: RequestView, num_computed_tokens: int, needs_encoding: bool
    ) -> Future[None] | None:
        storage, token_ids = self.storage, request.token_ids
        if storage is None or not self._loads_storage or storage.hangs:
            return None
        if not request.prefilled:
            storage.refresh_soon()
        size = self._block_size
        first, end = num_computed_tokens // size, (len(token_ids) - 1) // size
        end = min(end, first + self.host.capacity // self._buffers.block_bytes)
        if not request.prefilled:
            hashes = request.block_hashes.hash_full_blocks(token_ids, size)[first:end]
            end = first + self._keys.longest_hit(
                hashes, lambda key: key in self.host or storage.tier.may_contain(key)
            )
            if end > first and not (self._keys.are_all_needed or storage.tier.is_indexed):
                return self._read_longest_hit_ahead(request, first, end)
        # Blocks that all tokens need are read first: up to the first one that can't be read.
        blocks = self._keys.encoder_blocks(request.encoder_key) if needs_encoding else []
        if not all(storage.tier.may_contain(key) for block in blocks for key in block.keys):
            blocks = []
        if end > first:
            blocks += self._keys.blocks_of(request, first * size, end * size)
        keys = [key for block in blocks for key in block.keys if key not in self.host]
        if not keys:
            return None
        # Loading that takes longer than computing is useless.
        timeout_s = max(_MIN_READ_S, len(keys) * self._compute_s)
        return storage.read_ahead(
            keys,
            request.tenant,
            request.cache_namespace,
            timeout_s,
            source=request.kv_peer,
            refresh=request.prefilled,
        )

    def _read_longest_hit_ahead(
        self, request: RequestView, first: int, end: int
    ) -> Future[None] | None:
        """Read ahead for groups whose windows and states at a prompt's end are useful only if the
        storage has all of them for the same end, which must be looked up.
        """
        storage, size = self.storage, self._block_size
        if storage is None:
            return None
        # Not by the reader: once that is late, the request runs and hashes its tokens, too.
        hashes = request.block_hashes.hash_full_blocks(request.token_ids, size)[:end]
        timeout_s = max(_MIN_READ_S, (end - first) * self._compute_s)
        deadline = time.monotonic() + timeout_s
        keys, host, tier = self._keys, self.host, storage.tier

        def is_saved(key: bytes) -> bool:
            return key in host or (time.monotonic() < deadline and tier.is_stored(key))

        def keys_to_read() -> list[bytes]:
            num_blocks = keys.longest_hit(hashes[first:], functools.cache(is_saved))
            if not num_blocks:
                return []
            end = first + num_blocks
            blocks = keys.blocks_of_hashes(hashes[:end], first * size, end * size)
            return [key for block in blocks for key in block.keys if key not in host]

        return storage.read_ahead(keys_to_read, request.tenant, request.cache_namespace, timeout_s)

    def _find(self, request: RequestView, num_computed: int, num_swapped: int) -> _Match:
        """The longest run of verified blocks after a sequence's first `num_computed` tokens."""
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
        memory unchanged.
        """
        blocks = self._read_host(self._keys.blocks_of(request, num_computed, num_tokens))
        num_loaded = num_tokens - num_computed if blocks else 0
        return _Match(request.block_hashes, num_computed, num_loaded, blocks)

    def _read_host(self, keyed: Sequence[KeyedBlock]) -> list[tuple[KeyedBlock, list[Payload]]]:
        """Blocks with their payloads; [] unless all are in host memory unchanged."""
        blocks = []
        for block in keyed:
            payloads = [
                payload for key in block.keys if (payload := self.host.get(key)) is not None
            ]
            if len(payloads) < len(block.keys):
                return []
            blocks.append((block, payloads))
        self.host.touch([key for block, _ in blocks for key in block.keys])
        return blocks

    def load_encoder_states(self, request: RequestView, block_ids: list[list[int]]) -> bool:
        if not (self._loads_host or request.seq_id in self._swapped):
            return False
        blocks = self._read_host(self._keys.encoder_blocks(request.encoder_key))
        self._load_later(request, block_ids, blocks)
        return bool(blocks)

    def _load_later(
        self,
        request: RequestView,
        block_ids: list[list[int]],
        blocks: Sequence[tuple[KeyedBlock, list[Payload]]],
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
        num_saved = self._keys.longest_hit(hashes, self._ghosts.__contains__)
        num_present = self._keys.longest_hit(hashes[:num_saved], self._tier.__contains__)
        return (num_saved - num_present) * size

    def _record_saved(self, keys: Iterable[bytes]) -> None:
        tier = self.host if self.storage is None else self.storage.tier
        for key in keys:
            self._ghosts.pop(key, None)
            self._ghosts[key] = None
        while len(self._ghosts) * self._buffers.block_bytes > GHOST_FACTOR * tier.capacity:
            self._ghosts.popitem(last=False)

    def build_connector_meta(
        self, plan: PlanView, scheduled: Sequence[RequestView]
    ) -> OffloadingMetadata | None:
        self._step = plan.step
        for seq_id in plan.removed:
            self._tracked.pop(seq_id, None)
        loading: list[LoadedBlock] = []
        for new in plan.new:
            loading += self._starting.get(new.seq_id, ())
            self._tracked[new.seq_id] = _Tracked(
                [list(table) for table in new.block_ids], new.num_computed_tokens
            )
        self._starting.clear()
        for seq_id, block_ids in plan.new_blocks:
            for table, new_ids in zip(self._tracked[seq_id].block_ids, block_ids, strict=True):
                table += new_ids
        while self._loading and self._loading[0][0] < plan.step - self._max_in_flight:
            self._loading.popleft()  # of a step that wasn't run
        if loading:
            self._loading.append((plan.step, loading))
        swapped, self._swap_outs = self._swap_outs, []
        saves = self._filled_blocks(plan, scheduled) if self._saves else []
        removed = self._pop_removed(plan.step)
        if not (loading or swapped or saves or removed):
            return None
        loads = [block for block, _ in loading] if self._has_other_ranks else []
        return OffloadingMetadata(plan.step, swapped, saves, loads, removed)

    def _pop_removed(self, step: int) -> list[tuple[int, bytes]]:
        """The keys that the plan of `step` must remove on other ranks. A running step may still
        save again what was removed.
        """
        removed = []
        while self._removed and self._removed[0][0] < step - self._max_in_flight:
            entry = self._removed.popleft()
            if entry[1] not in self.host:
                removed.append(entry)
        return removed

    def _filled_blocks(self, plan: PlanView, scheduled: Sequence[RequestView]) -> list[SavedBlocks]:
        """The blocks that a step fills, and the states that it saves, which no tier has yet."""
        saves: list[SavedBlocks] = []
        size, keys_of = self._block_size, self._keys.of_block
        checkpoints: dict[int, list[tuple[int, int]]] = {}
        for seq_id, num_tokens, block_id in plan.checkpoints:
            checkpoints.setdefault(seq_id, []).append((num_tokens, block_id))
        encoded = {task.seq_id for task in plan.encode}
        for sequence in scheduled:
            tracked, token_ids = self._tracked[sequence.seq_id], sequence.token_ids
            end = min(sequence.num_computed_tokens, len(token_ids)) // size
            states = checkpoints.get(sequence.seq_id, ())
            if end <= tracked.num_saved and not states and sequence.seq_id not in encoded:
                tracked.num_computed = sequence.num_computed_tokens
                continue
            hashes = sequence.block_hashes.hash_full_blocks(token_ids, size)
            blocks: list[PlannedBlock] = [
                (index, table[position], keys_of(index, hashes[position]))
                for position in range(tracked.num_saved, end)
                for index, (group, table) in enumerate(
                    zip(self._layout.groups, tracked.block_ids, strict=True)
                )
                # A block that left a window before the step may belong to another sequence now.
                if group.kind in ("full", "window")
                and position >= group.first_needed_block(tracked.num_computed, size)
            ]
            state_group = len(self._layout.groups) - 1
            blocks += [
                (state_group, block_id, keys_of(state_group, hashes[num_tokens // size - 1]))
                for num_tokens, block_id in states
                # Drafts and tokens that are still being sampled aren't known yet.
                if num_tokens % size == 0 and num_tokens <= len(token_ids)
            ]
            if sequence.seq_id in encoded:
                encoder_blocks = self._keys.encoder_blocks(sequence.encoder_key)
                blocks += _planned(encoder_blocks, tracked.block_ids)
            tracked.num_saved = max(tracked.num_saved, end)
            tracked.num_computed = sequence.num_computed_tokens
            self._record_saved(key for block in blocks for key in block[2])
            blocks = [block for block in blocks if not all(key in self._tier for key in block[2])]
            if blocks:
                saves.append((sequence.tenant, sequence.cache_namespace, blocks))
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
        keyed += self._keys.encoder_blocks(request.encoder_key)
        blocks = _planned(keyed, block_ids)
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
            self._save(blocks, tenant, self.host)
        while self._loading and self._loading[0][0] <= metadata.step:
            step, loads = self._loading.popleft()
            if step == metadata.step:
                for (group, block_id, _), payloads in loads:
                    self._buffers.write(group, block_id, payloads)

    def _save(
        self, blocks: list[PlannedBlock], tenant: str, tier: HostTier | StorageQueue
    ) -> list[tuple[bytes, Payload]]:
        """Save the blocks of a sequence that a tier doesn't have."""
        max_blocks = self.host.capacity // self._buffers.block_bytes
        payloads = [
            (key, payload)
            for group, block_id, keys in blocks[:max_blocks]
            if not all(key in tier for key in keys)
            for key, payload in zip(keys, self._buffers.read(group, block_id), strict=True)
        ]
        self.host.put(payloads, tenant)
        self.num_saved_blocks += len(payloads)
        return payloads

    def wait_for_save(self) -> None:
        metadata = self._metadata
        if isinstance(metadata, OffloadingMetadata):
            for tenant, namespace, blocks in metadata.saves:
                payloads = self._save(blocks, tenant, self._tier)
                if self.storage is not None:
                    self.storage.queue_writes(payloads, namespace, tenant)

    def find_tier(self, block_hash: bytes) -> str:
        return self._tier_name if self._keys.first_key(block_hash) in self._tier else ""

    @property
    def _tier_name(self) -> str:
        """Name of the tier to which filled blocks are saved."""
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
        failures = host.failures.copy()
        stats.kv_tier_bytes = {host.name: host.used_bytes}
        stats.kv_tier_capacity_bytes = {host.name: host.capacity}
        stats.kv_tier_hit_tokens_total = {self._tier_name: self.num_matched_tokens}
        stats.kv_tier_evicted_tokens_total = {self._tier_name: self.num_evicted_tokens}
        stats.kv_tier_saved_seconds_total = {
            self._tier_name: self.num_matched_tokens * self._saved_s_per_token
        }
        if self.storage is not None:
            tier = self.storage.tier
            failures += tier.failures
            stats.kv_tier_bytes[tier.name] = tier.used_bytes
            stats.kv_tier_capacity_bytes[tier.name] = tier.capacity
        stats.kv_tier_failures_total = dict(failures)

    def set_prefill_pace(self, seconds_per_token: float) -> None:
        self._compute_s = compute_s = self._block_size * seconds_per_token
        load_s = min(self._measure_load() for _ in range(_NUM_MEASUREMENTS))
        read_s = 0.0
        if self.storage is not None:
            tier = self.storage.tier
            read_s = min(tier.measure_read() for _ in range(_NUM_MEASUREMENTS))
            read_s *= len(self._growing_groups)
        self._saved_s_per_token = max(0.0, compute_s - load_s - read_s) / self._block_size
        if self._saves:
            self._loads_host = self._loads_host and load_s < compute_s
            self._loads_storage = self._loads_storage and load_s + read_s < compute_s
        # Otherwise it is a consumer: other replicas compute prompts so that this one needn't.
        log.info(
            "KV blocks: %.2f ms to compute, %.2f ms to load, %.2f ms to read from storage",
            1000 * compute_s, 1000 * load_s, 1000 * read_s,
        )  # fmt: skip

    @property
    def _growing_groups(self) -> list[int]:
        """The groups whose blocks `block_size` tokens fill. A state is loaded once, so it counts
        only where no layer attends; an encoder's states don't grow.
        """
        groups = self._layout.groups
        growing = [
            index for index, group in enumerate(groups) if group.layers and group.kind != "cross"
        ]
        return growing or [len(groups) - 1]

    def _measure_load(self) -> float:
        """Seconds that loading the blocks of `block_size` tokens takes; no blocks may be in use
        yet.
        """
        started = time.perf_counter()
        for group in self._growing_groups:
            self._buffers.write(group, 0, self._buffers.read(group, 0))
        return time.perf_counter() - started

    def reset_cache(self) -> None:
        # For instance blocks of other weights, which other replicas may have stored.
        self._numerics = secrets.token_bytes(32)
        self._make_keys()
        self._match = None
        self._ghosts.clear()
        self.host.clear()
        self.reset_encoder_cache()

    def reset_encoder_cache(self) -> None:
        if self.ec_connector is not None:
            self.ec_connector.reset_cache()

    def shutdown(self) -> None:
        if self.storage is not None:
            self.storage.close()
        self.host.clear()


def _planned(blocks: Sequence[KeyedBlock], block_ids: list[list[int]]) -> list[PlannedBlock]:
    """Blocks of a sequence with the block tables `block_ids`, by group."""
    return [(block.group, block_ids[block.group][block.position], block.keys) for block in blocks]
