"""`RankConnector`: the part of another rank than the first in saving and loading KV blocks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from engine.kv_cache import KVCacheConfig
from engine.kv_transfer.base import (
    KVCaches,
    KVConnectorBase,
    KVConnectorMetadata,
    PlanView,
    RequestView,
)
from engine.kv_transfer.block_buffers import BlockBuffers
from engine.kv_transfer.host_tier import HostTier
from engine.kv_transfer.offloading_metadata import OffloadingMetadata, PlannedBlock
from engine.kv_transfer.ranked_storage import FlushParts, PartsReply, ReadParts, part_key
from engine.kv_transfer.storage_queue import StorageQueue, log_error


class RankConnector(KVConnectorBase):
    """Keeps this rank's part of the blocks that the first rank's tier in host memory has, and
    writes them to a storage.

    The first rank alone finds blocks and evicts them, and says so in its plans: two tiers of the
    same size would differ, because blocks are looked up while a step runs. Plans come later than
    what they say, so that there are more blocks here at times, and never fewer.
    """

    metadata_type = OffloadingMetadata

    def __init__(
        self, rank: int, layout: KVCacheConfig, host: HostTier, storage: StorageQueue | None
    ) -> None:
        """
        Args:
            rank: this one's number.
            layout: the KV cache groups of the layers here.
            host: the first rank bounds it: as many blocks as there must fit into it.
            storage: where parts are written, and read from; None: nowhere.
        """
        self.host, self.storage = host, storage
        self._rank, self._layout = rank, layout
        #: By key of a part, the last step that was to save it, and the last call to read it.
        self._saved_in: dict[bytes, int] = {}
        self._read_by: dict[bytes, int] = {}
        self._read_lock = threading.Lock()
        self._step_finished = threading.Condition()
        self._finished_step = 0
        self._flusher = ThreadPoolExecutor(1, "kv-flush")

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        self._buffers = BlockBuffers(kv_caches, self._layout)

    def _parts(self, keys: Sequence[bytes]) -> list[bytes]:
        """This rank's keys of a block."""
        return [part_key(key, self._rank) for key in keys]

    def start_load_kv(self, forward_context: Any = None, **kwargs: Any) -> None:
        metadata = self._metadata
        if not isinstance(metadata, OffloadingMetadata):
            return
        for tenant, namespace, blocks in metadata.swapped:
            self._save(blocks, metadata.step, tenant, namespace, None)
        for group, block_id, keys in metadata.loads:
            payloads = [self.host.get(key) for key in self._parts(keys)]
            if any(payload is None for payload in payloads):
                raise LookupError(f"block {block_id} isn't in host memory as it was saved")
            self._buffers.write(group, block_id, [p for p in payloads if p is not None])
        with self._read_lock:
            for step, key in metadata.removed:
                part = part_key(key, self._rank)
                # One that was saved or read again since then is in the first rank's tier.
                is_read = self._read_by.get(part, 0) > metadata.num_calls
                if not is_read and self._saved_in.get(part, step) <= step:
                    self.host.remove(part)
                    self._saved_in.pop(part, None)
                    self._read_by.pop(part, None)

    def wait_for_save(self) -> None:
        metadata = self._metadata
        if isinstance(metadata, OffloadingMetadata):
            for tenant, namespace, blocks in metadata.saves:
                self._save(blocks, metadata.step, tenant, namespace, self.storage)
            if metadata.saves and self.storage is not None:
                self.storage.refresh_soon()  # a part that another process has deleted is lost

    def _save(
        self,
        blocks: Sequence[PlannedBlock],
        step: int,
        tenant: str,
        namespace: str,
        storage: StorageQueue | None,
    ) -> None:
        for group, block_id, keys in blocks:
            parts = self._parts(keys)
            if not all(
                part in self.host and (storage is None or part in storage) for part in parts
            ):
                payloads = list(zip(parts, self._buffers.read(group, block_id), strict=True))
                self.host.put(payloads, "")
                if storage is not None:
                    storage.queue_writes(payloads, namespace, tenant)
            self._saved_in.update(dict.fromkeys(parts, step))

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        with self._step_finished:
            self._finished_step = self.last_step
            self._step_finished.notify_all()

    def serve(self, call: ReadParts | FlushParts, reply: Callable[[PartsReply], None]) -> None:
        """Do what the first rank asks, beside steps. `reply` is called in any thread."""
        storage = self.storage
        if storage is None:
            reply(PartsReply(call.number))
        elif isinstance(call, FlushParts):
            self._flusher.submit(self._flush, storage, call, reply).add_done_callback(log_error)
        else:
            self._read(storage, call, reply)

    def _read(
        self, storage: StorageQueue, call: ReadParts, reply: Callable[[PartsReply], None]
    ) -> None:
        parts = self._parts(call.keys)
        with self._read_lock:
            self._read_by.update(dict.fromkeys(parts, call.number))

        def on_read(reading: Future[None]) -> None:
            log_error(reading)
            num_read = next(
                (n for n, part in enumerate(parts) if part not in self.host), len(parts)
            )
            is_lost = num_read < len(parts) and not storage.may_contain(parts[num_read])
            try:
                if is_lost:
                    storage.tier.refresh()  # others may be, too: all are to be written again
            finally:  # it fails if the folder is gone, and the first rank waits
                failures = Counter(self.host.failures) + storage.failures
                reply(PartsReply(call.number, num_read, is_lost, failures=dict(failures)))

        storage.read_ahead(
            parts,
            call.tenant,
            call.namespace,
            call.timeout_s,
            refresh=not all(map(storage.may_contain, parts)),
        ).add_done_callback(on_read)

    def _flush(
        self, storage: StorageQueue, call: FlushParts, reply: Callable[[PartsReply], None]
    ) -> None:
        """Write the parts that steps up to the call's save, some of which may still run here."""
        with self._step_finished:
            is_written = self._step_finished.wait_for(
                lambda: self._finished_step >= call.step, call.timeout_s
            )
        try:
            storage.flush(call.timeout_s)
        except TimeoutError:
            is_written = False
        reply(PartsReply(call.number, is_written=is_written))

    def reset_cache(self) -> None:
        self.host.clear()
        self._saved_in.clear()
        with self._read_lock:
            self._read_by.clear()

    def shutdown(self) -> None:
        if self.storage is not None:
            self.storage.close()
        self._flusher.shutdown(wait=False)
        self.reset_cache()

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False  # the first rank decides

    def update_state_after_alloc(
        self, request: RequestView, block_ids: list[list[int]], num_external_tokens: int
    ) -> None:
        """Do nothing: only the first rank needs this."""

    def build_connector_meta(
        self, plan: PlanView, scheduled: Sequence[RequestView]
    ) -> KVConnectorMetadata | None:
        return None
