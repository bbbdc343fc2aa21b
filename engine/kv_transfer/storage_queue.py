"""`StorageQueue`: reads and writes of a storage tier, in threads of their own."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from engine.kv_transfer.block_buffers import Payload
from engine.kv_transfer.host_tier import HostTier
from engine.kv_transfer.storage_tier import StorageTier

log = logging.getLogger(__name__)

#: How long another replica's blocks may go unnoticed.
_REFRESH_S = 1.0
#: Timeout of reading a request's blocks, after which they are computed: a storage may hang.
READ_TIMEOUT_S = 10.0
#: How long a prefill replica's outputs wait for its blocks to be saved. While a storage hangs,
#: later outputs don't wait.
SAVE_TIMEOUT_S = 2.0
#: Number of sequences whose blocks are read concurrently: one that hangs doesn't block the others.
NUM_READERS = 4
#: How long a stopping replica waits for its blocks to be written: a storage may be slow, and the
#: supervisor kills the replica after 10 s.
CLOSE_TIMEOUT_S = 5.0


class StorageQueue:
    """Writes blocks in the background, and reads them ahead into host memory.

    Attributes:
        tier: the storage.
        num_parts: that a block has there.
    """

    num_parts = 1

    def __init__(
        self, tier: StorageTier, host: HostTier, max_queued_bytes: int | None = None
    ) -> None:
        """`host`: tier for blocks that were read. `max_queued_bytes`: of blocks to be written;
        None: what `host` has room for.
        """
        self.tier, self._host = tier, host
        self._max_queued_bytes = host.capacity if max_queued_bytes is None else max_queued_bytes
        self._writer = ThreadPoolExecutor(1, "kv-write")
        self._readers = ThreadPoolExecutor(NUM_READERS, "kv-read")
        self._followers = ThreadPoolExecutor(NUM_READERS, "kv-follow")
        #: Ids of the requests whose blocks other replicas compute.
        self._followed: set[str] = set()
        self._lock = threading.Lock()
        self._queued: set[bytes] = set()
        self._queued_bytes = 0
        self._refreshed_at = time.monotonic()
        self._refresh: Future[None] | None = None
        #: When the readers that are at work began, by thread.
        self._reading_since: dict[int, float] = {}
        #: The last `flush`; not done after it timed out.
        self._late_flush: Future[None] | None = None
        #: When the queue is closed: what isn't written or read by then never is.
        self._closes_at = math.inf

    def __contains__(self, key: bytes) -> bool:
        """Whether a block is stored or about to be."""
        return key in self.tier or key in self._queued

    def may_contain(self, key: bytes) -> bool:
        """Whether a block is worth a try to read it."""
        return self.tier.may_contain(key)

    def is_saved(self, key: bytes) -> bool:
        """Whether a block that a plan saves needn't be copied from the KV cache."""
        return key in self

    @property
    def failures(self) -> Counter[str]:
        """Number of blocks that couldn't be read or written, by reason."""
        return self.tier.failures

    @property
    def hangs(self) -> bool:
        """Whether a reader has been at the same blocks for longer than a request waits."""
        with self._lock:
            since = min(self._reading_since.values(), default=time.monotonic())
        return time.monotonic() - since > READ_TIMEOUT_S

    def queue_writes(
        self, blocks: Sequence[tuple[bytes, Payload]], namespace: str, tenant: str = ""
    ) -> None:
        """Write blocks of a tenant's sequence later; those that the queue has no space for are
        counted.
        """
        for key, payload in blocks:
            with self._lock:
                is_full = self._queued_bytes + payload.nbytes > self._max_queued_bytes
                if not is_full:
                    self._queued_bytes += payload.nbytes
                    self._queued.add(key)
            if is_full:
                self.tier.count_failure("queue_full")
                continue
            write = self._writer.submit(self._write, key, payload, namespace, tenant)
            write.add_done_callback(log_error)

    def _write(self, key: bytes, payload: Payload, namespace: str, tenant: str) -> None:
        try:
            if time.monotonic() < self._closes_at:
                self.tier.write(key, payload, namespace, tenant)
        finally:
            with self._lock:
                self._queued_bytes -= payload.nbytes
                self._queued.discard(key)

    def read_ahead(
        self,
        keys: Sequence[bytes] | Callable[[], Sequence[bytes]],
        tenant: str,
        namespace: str,
        timeout_s: float,
        *,
        source: str = "",
        refresh: bool = False,
        more: Callable[[Payload], Sequence[bytes]] | None = None,
    ) -> Future[None]:
        """Read blocks of a tenant's sequence, in its order, up to the first that can't be read.
        Keys that only the storage tells are found in the reader's thread.

        After `timeout_s` no further block is begun, and that is counted. `source`: see
        `StorageTier.read_sequence`; `refresh`: look for blocks that another replica has just
        written; `more`: names the keys that follow by the first block.
        """
        deadline = time.monotonic() + timeout_s
        return self._readers.submit(
            self._read, keys, tenant, namespace, source, deadline, refresh, more
        )

    def _read(
        self,
        keys: Sequence[bytes] | Callable[[], Sequence[bytes]],
        tenant: str,
        namespace: str,
        source: str,
        deadline: float,
        refresh: bool,
        more: Callable[[Payload], Sequence[bytes]] | None,
    ) -> None:
        thread = threading.get_ident()
        with self._lock:
            self._reading_since[thread] = time.monotonic()
        blocks: list[tuple[bytes, Payload]] = []
        try:
            if callable(keys):
                keys = keys()
            if time.monotonic() < min(deadline, self._closes_at):
                if refresh:
                    self.tier.refresh()
                read = partial(self._read_blocks, tenant, namespace, source, deadline)
                blocks = read(keys)
                if more is not None and blocks:
                    following = more(blocks[0][1])
                    blocks += read(following)
                    keys = [*keys, *following]
            if len(blocks) < len(keys) and time.monotonic() > deadline:
                self.tier.count_failure("late")
            self._host.put(blocks, tenant)
        finally:
            with self._lock:
                del self._reading_since[thread]

    def follow(
        self, request_id: str, keys: Sequence[bytes], tenant: str, namespace: str, source: str
    ) -> None:
        """Read the blocks of a tenant's request while another replica computes them."""
        self._followed.add(request_id)
        following = self._followers.submit(
            self._follow, request_id, keys, tenant, namespace, source
        )
        following.add_done_callback(log_error)
        following.add_done_callback(lambda _: self.stop_following(request_id))

    def stop_following(self, request_id: str) -> None:
        """Don't wait for more blocks of a request."""
        self._followed.discard(request_id)

    def _follow(
        self, request_id: str, keys: Sequence[bytes], tenant: str, namespace: str, source: str
    ) -> None:
        def is_computed() -> bool:
            return request_id in self._followed and time.monotonic() < self._closes_at

        # If it had to wait for a thread, the request itself may have come and read them.
        keys = [key for key in keys if key not in self._host]
        payloads = self.tier.follow_sequence(keys, namespace, source, is_computed)
        for key, payload in zip(keys, payloads, strict=False):
            self._host.put([(key, payload)], tenant)
            if not is_computed():
                return

    def _read_blocks(
        self, tenant: str, namespace: str, source: str, deadline: float, keys: Sequence[bytes]
    ) -> list[tuple[bytes, Payload]]:
        blocks: list[tuple[bytes, Payload]] = []
        for payload in self.tier.read_sequence(keys, namespace, source, tenant):
            blocks.append((keys[len(blocks)], payload))
            if time.monotonic() > min(deadline, self._closes_at):
                break
        return blocks

    def refresh_soon(self) -> None:
        """Scan for blocks of other replicas, unless a scan is in progress or was just done."""
        if self._refresh is not None and not self._refresh.done():
            return  # one that hangs takes one reader, not all
        if time.monotonic() - self._refreshed_at > _REFRESH_S:
            self._refreshed_at = time.monotonic()
            self._refresh = self._readers.submit(self.tier.refresh)
            self._refresh.add_done_callback(log_error)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all that waits now is written.

        Raises `TimeoutError`; at once while what an earlier call has waited for isn't written.
        """
        if self._late_flush is not None and not self._late_flush.done():
            raise TimeoutError("The storage hangs.")
        flush = self._late_flush = self._writer.submit(lambda: None)
        flush.result(timeout_s)

    def close(self) -> None:
        """Write pending blocks, for at most `CLOSE_TIMEOUT_S`, and stop the threads."""
        self._closes_at = time.monotonic() + CLOSE_TIMEOUT_S
        self._writer.shutdown()
        self._closes_at = 0.0
        self._followers.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown()
        self.tier.close()


def log_error(future: Future[None]) -> None:
    """Log what a storage's thread has raised."""
    if (error := future.exception()) is not None:
        log.error("A storage tier failed", exc_info=error)


def all_done(readings: Sequence[Future[None]]) -> Future[None]:
    """Done when all of them are; with the error of the last that failed, if any has."""
    if len(readings) == 1:
        return readings[0]
    result: Future[None] = Future()
    lock, num_pending, error = threading.Lock(), len(readings), None

    def on_done(reading: Future[None]) -> None:
        nonlocal num_pending, error
        with lock:
            num_pending -= 1
            error = reading.exception() or error
            is_last = not num_pending
        if is_last and error is not None:
            result.set_exception(error)
        elif is_last:
            result.set_result(None)

    for reading in readings:
        reading.add_done_callback(on_done)
    return result
