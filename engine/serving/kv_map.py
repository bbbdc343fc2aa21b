"""Live map of a replica's KV blocks for observers: the changes, at most ten times a second.

The pool records changed blocks only while there are observers, so it costs nothing otherwise.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict

import redis

from engine.contract import messages as protocol
from engine.contract.lora import adapter_name_of
from engine.contract.replica_state import (
    MAX_LISTED_USERS,
    KVMapBlock,
    KVMapFrame,
    TenantBlocks,
    frames_key,
)
from engine.kv_cache import Block
from engine.kv_transfer.base import KVConnectorBase
from engine.scheduler import Request, Scheduler, Sequence
from engine.system.redis_client import is_temporary

log = logging.getLogger(__name__)

FRAME_S = 0.1
#: After a slow frame, pause for this many times its duration, so that observing a large pool takes
#: at most a fiftieth of the engine's time.
REMAINDER = 50


class KVMapPublisher(threading.Thread):
    """Publishes frames, one at a time. Frames that Redis doesn't accept are lost."""

    def __init__(self, client: redis.Redis, prefix: str, replica_id: str) -> None:
        super().__init__(name="block-map", daemon=True)
        self._redis, self._channel = client, frames_key(replica_id, prefix)
        self._queue: queue.SimpleQueue[KVMapFrame] = queue.SimpleQueue()
        self.busy = False

    def put(self, frame: KVMapFrame) -> None:
        """Publish a frame soon; `busy` until then."""
        self.busy = True
        self._queue.put(frame)

    def run(self) -> None:
        while True:
            frame = self._queue.get()
            try:
                self._redis.publish(self._channel, protocol.encode(frame))
            except redis.RedisError as error:
                if not is_temporary(error):
                    raise
                log.debug("A frame of the block map is lost: %s", error)
            self.busy = False


class KVMapBuilder:
    """Makes frames in the engine's thread, from the scheduler's pool and block tables.

    `watch` may be called from another thread.
    """

    def __init__(self, publisher: KVMapPublisher, replica_id: str, incarnation: str) -> None:
        self._publisher = publisher
        self._replica_id, self._incarnation = replica_id, incarnation
        #: The watch key's value, b"" without observers; and the value for which frames were
        #: started.
        self.asked = b""
        self._run = b""
        self._number = 0
        self._next_at = 0.0
        #: Per reported block: the hash it cached, the adapter, and the media.
        self._cached: dict[int, bytes] = {}
        self._adapters: dict[int, str] = {}
        self._media: dict[int, str] = {}

    def watch(self, number: bytes) -> None:
        """Set the current value of the watch key."""
        self.asked = number

    def publish_if_due(self, scheduler: Scheduler) -> None:
        """Publish a frame if there are observers and the interval has passed."""
        if not self.asked:
            if self._run:
                self._end(scheduler)
            return
        now = time.monotonic()
        if now < self._next_at or self._publisher.busy:
            return
        if not self._publisher.is_alive():
            self._publisher.start()
        self._publisher.put(self.frame(scheduler))
        took = time.monotonic() - now
        self._next_at = now + max(FRAME_S, REMAINDER * took)

    def _end(self, scheduler: Scheduler) -> None:
        """Stop: there are no observers any more."""
        scheduler.kv.pool.changed_block_ids = None
        self._run = b""
        self._cached.clear()
        self._adapters.clear()
        self._media.clear()

    def frame(self, scheduler: Scheduler) -> KVMapFrame:
        """The changes since the last frame; for new observers, all blocks that were ever used."""
        pool, asked = scheduler.kv.pool, self.asked
        is_full = asked != self._run or pool.changed_block_ids is None
        if is_full:
            self._run, self._number = asked, 0
            changed = [b for b in pool.blocks if b.charged_to is not pool.quotas.unowned]
        else:
            changed = [pool.blocks[block_id] for block_id in pool.changed_block_ids or ()]
        pool.changed_block_ids = set()
        self._number += 1
        frame = KVMapFrame(
            replica_id=self._replica_id,
            incarnation=self._incarnation,
            number=self._number,
            run=int(asked),
            at=time.time(),
            num_blocks=pool.num_blocks,
            block_size=scheduler.kv.block_size,
            num_free=pool.num_free_blocks,
            num_cached=pool.num_cached,
            whole=is_full,
            tenants=_tenants(scheduler),
        )
        if changed:
            self._fill(frame, changed, *_users(scheduler), scheduler.kv_connector)
        return frame

    def _fill(
        self,
        frame: KVMapFrame,
        changed: list[Block],
        users: dict[int, list[Sequence]],
        positions: dict[int, int],
        connector: KVConnectorBase | None,
    ) -> None:
        words: dict[str, int] = {}
        for block in changed:
            block_id, mine = block.block_id, users.get(block.block_id, ())
            previous, cached = self._cached.pop(block_id, None), block.block_hash is not None
            if block.block_hash is not None:
                self._cached[block_id] = block.block_hash
            if previous is not None and previous != block.block_hash:
                frame.evicted += 1
            tier = ""
            if block.block_hash is not None and connector is not None:
                tier = connector.find_tier(block.block_hash)
            if mine:
                self._adapters[block_id] = adapter_name_of(mine[0].request.message.adapter)
            elif not cached or previous != block.block_hash:  # of the former content
                self._adapters.pop(block_id, None)
                self._media.pop(block_id, None)
            owner = "" if block.charged_to is None else block.charged_to.name
            # Only the block's owner may learn which request uses it, if that's the owner's own.
            owner_requests = [
                sequence.request for sequence in mine if sequence.request.message.tenant == owner
            ]
            if owner_requests:
                first = positions[block_id] * frame.block_size
                self._media[block_id] = _media_name(owner_requests[0], first, frame.block_size)
            names = {sequence.request_id: None for sequence in owner_requests[:MAX_LISTED_USERS]}
            frame.blocks.append(
                KVMapBlock(
                    block_id,
                    block.ref_count,
                    cached,
                    words.setdefault(owner, len(words)),
                    [words.setdefault(name, len(words)) for name in names],
                    words.setdefault(self._adapters.get(block_id, ""), len(words)),
                    words.setdefault(tier, len(words)),
                    words.setdefault(self._media.get(block_id, ""), len(words)),
                )
            )
        frame.words = list(words)


def _tenants(scheduler: Scheduler) -> list[TenantBlocks]:
    manager = scheduler.kv.states
    states = {} if manager is None else {quota.name: quota for quota in manager.pool.quotas}
    return [
        TenantBlocks(
            quota.name,
            quota.used,
            quota.free.count,
            quota.reserved,
            quota.maximum,
            quota.running,
            quota.sequences - quota.running,
            states[quota.name].used if quota.name in states else 0,
            states[quota.name].free.count if quota.name in states else 0,
        )
        for quota in scheduler.kv.quotas
    ]


def _users(scheduler: Scheduler) -> tuple[dict[int, list[Sequence]], dict[int, int]]:
    """By block, the running sequences whose tables hold it, and its index in the first's table."""
    users: dict[int, list[Sequence]] = defaultdict(list)
    positions: dict[int, int] = {}
    for sequence in scheduler.running:
        for manager in scheduler.kv.managers:
            for index, block in enumerate(manager.tables.get(sequence.seq_id, ())):
                if block.ref_count:
                    users[block.block_id].append(sequence)
                    positions.setdefault(block.block_id, index)
    return users, positions


def _media_name(request: Request, start: int, count: int) -> str:
    """Kind and digest of the first medium in tokens [start, start + count); "" for none."""
    for item in request.message.media:
        if item.start < start + count and item.end > start:
            return f"{item.kind} {item.digest.hex()[:12]}"
    return ""
