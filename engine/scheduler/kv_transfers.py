"""`KVTransfers`: blocks that a KV connector loads or sends while steps run."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from engine.kv_cache import KVCacheCoordinator
from engine.kv_transfer.base import KVConnectorBase
from engine.kv_transfer.storage_queue import READ_TIMEOUT_S
from engine.scheduler.request import Sequence, SequenceStatus
from engine.scheduler.request_queue import RequestQueue

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Load:
    """A sequence that waits for its blocks.

    Attributes:
        status: the sequence's, before it waited.
        step: the step that tells the connector to load them.
        deadline: when it is computed instead, by the monotonic clock.
    """

    sequence: Sequence
    status: SequenceStatus
    step: int
    deadline: float


class KVTransfers:
    """Blocks that a KV connector loads or sends while steps run.

    A sequence whose blocks are loaded waits in no queue. Once the connector names it, its blocks
    are cached and freed, and it is queued again: it finds them as it would find any cached prefix.
    Blocks stay allocated until the connector names their sequence, also those of sequences that
    have ended or wait no longer: it may still read or write them.

    Attributes:
        num_failures: by reason, blocks that couldn't be loaded ("load_error"), and sequences whose
            blocks didn't come in time ("late").
    """

    def __init__(self, kv: KVCacheCoordinator, waiting: RequestQueue) -> None:
        self._kv, self._waiting = kv, waiting
        self._loads: dict[str, _Load] = {}
        #: By request id, (key of the block tables, tenant) of sequences that have ended or wait no
        #: longer: of loads, and of blocks that are sent.
        self._loading: dict[str, tuple[int, str]] = {}
        self._sending: dict[str, tuple[int, str]] = {}
        self._num_late = 0
        #: Ended since the connector was last asked.
        self._finished_ids: set[str] = set()
        self._failed_block_ids: set[int] = set()
        self.num_failures = {"load_error": 0, "late": 0}

    @property
    def num_loads(self) -> int:
        """Number of sequences that wait for their blocks."""
        return len(self._loads)

    def __len__(self) -> int:
        """Number of requests whose blocks the connector holds."""
        return len(self._loads) + len(self._loading) + len(self._sending)

    def __contains__(self, request_id: str) -> bool:
        """Whether the connector holds blocks under this id: what it says of them must not be taken
        for what it says of others.
        """
        return any(request_id in owned for owned in (self._loads, self._loading, self._sending))

    @property
    def tenants(self) -> dict[int, str]:
        """By key of their block tables, the tenants of sequences whose blocks are held."""
        loads = [(load.sequence.seq_id, load.sequence.tenant) for load in self._loads.values()]
        return dict([*loads, *self._loading.values(), *self._sending.values()])

    def begin_load(self, sequence: Sequence, step: int) -> None:
        """A sequence, which is in no queue, waits for its blocks; `step` begins to load them."""
        deadline = time.monotonic() + READ_TIMEOUT_S
        self._loads[sequence.request_id] = _Load(sequence, sequence.status, step, deadline)
        sequence.status = SequenceStatus.WAITING_FOR_REMOTE_KVS
        sequence.kv_awaited = True

    def finish(self, sequence: Sequence, *, delays: bool) -> bool:
        """A sequence has ended. `delays`: the connector still sends its blocks. Returns whether
        they stay allocated.
        """
        self._finished_ids.add(sequence.request_id)
        is_loading = self._loads.pop(sequence.request_id, None) is not None
        if not (is_loading or delays):
            return False
        retained = self._loading if is_loading else self._sending
        retained[sequence.request_id] = (sequence.seq_id, sequence.tenant)
        return True

    def poll(self, connector: KVConnectorBase) -> list[Sequence]:
        """Ask the connector what has arrived and what is sent. Returns the sequences of which
        blocks couldn't be loaded, or not in time; they are queued and compute these.
        """
        finished_ids, self._finished_ids = self._finished_ids, set()
        sent, received = connector.get_finished(finished_ids)
        if not self:
            return []
        self._failed_block_ids |= connector.get_block_ids_with_load_errors()
        failed: list[Sequence] = []
        for request_id in received or ():
            if (load := self._loads.pop(request_id, None)) is not None:
                if not self._receive(load.sequence):
                    failed.append(load.sequence)
                self._queue(load)
            elif (retained := self._loading.pop(request_id, None)) is not None:
                self._failed_block_ids.difference_update(self._block_ids(retained[0]))
                self._free(*retained)
        for request_id in sent or ():
            if (retained := self._sending.pop(request_id, None)) is not None:
                self._free(*retained)
        now = time.monotonic()
        for request_id, load in list(self._loads.items()):
            if now > load.deadline:
                del self._loads[request_id]
                self.num_failures["late"] += 1
                log.error(
                    "%s hasn't loaded the KV blocks of request %s within %.0f s: they are computed "
                    "in others, and these aren't used until it names the request.",
                    type(connector).__name__, request_id, READ_TIMEOUT_S,
                )  # fmt: skip
                self._num_late += 1
                self._kv.move_tables(load.sequence.seq_id, -self._num_late)
                self._loading[request_id] = (-self._num_late, load.sequence.tenant)
                self._queue(load)
                failed.append(load.sequence)
        if not self._loads:
            self._failed_block_ids.clear()
        return failed

    def _receive(self, sequence: Sequence) -> bool:
        """Cache and free the blocks that were loaded; whether all were."""
        block_ids = self._block_ids(sequence.seq_id)
        failed = self._failed_block_ids.intersection(block_ids)
        first = min(map(block_ids.index, failed), default=len(block_ids))
        num_tokens = min(sequence.num_computed_tokens, first * self._kv.block_size)
        self._kv.cache_full_blocks(sequence, num_tokens)
        self._free(sequence.seq_id, sequence.tenant)
        self._failed_block_ids -= failed
        self.num_failures["load_error"] += len(failed)
        return not failed

    def _block_ids(self, key: int) -> list[int]:
        [table] = self._kv.get_block_tables(key)
        return [block.block_id for block in table]

    def _queue(self, load: _Load) -> None:
        load.sequence.status, load.sequence.num_computed_tokens = load.status, 0
        self._waiting.prepend(load.sequence)

    def _free(self, key: int, tenant: str) -> None:
        self._kv.free(key, self._kv.quotas.get(tenant))

    def drop_unstarted(self, connector: KVConnectorBase) -> None:
        """Steps have failed before they told the connector to load: queue their sequences, which
        compute their tokens.
        """
        for request_id, load in list(self._loads.items()):
            if load.step > connector.last_step:
                del self._loads[request_id]
                self._free(load.sequence.seq_id, load.sequence.tenant)
                self._queue(load)
