"""`DiskQueue`: reads and writes of a disk tier, in threads of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from engine.kv_transfer.block_buffers import Payload
from engine.kv_transfer.disk_tier import DiskTier
from engine.kv_transfer.host_tier import HostTier

log = logging.getLogger(__name__)

#: How long another replica's blocks may go unnoticed.
_REFRESH_S = 1.0


class DiskQueue:
    """Writes blocks behind, and reads them ahead into host memory.

    Attributes:
        disk: the tier.
    """

    def __init__(self, disk: DiskTier, host: HostTier) -> None:
        """`host`: where blocks that are read go; as many bytes may wait to be written."""
        self.disk, self._host = disk, host
        self._writer = ThreadPoolExecutor(1, "kv-write")
        self._reader = ThreadPoolExecutor(1, "kv-read")
        self._lock = threading.Lock()
        self._queued: set[bytes] = set()
        self._queued_bytes = 0
        self._refreshed_at = time.monotonic()

    def __contains__(self, key: bytes) -> bool:
        """Whether a block is on disk or about to be."""
        return key in self.disk or key in self._queued

    def write_behind(self, blocks: Sequence[tuple[bytes, Payload]], namespace: str) -> None:
        """Write blocks of one sequence later. Those for which the queue is full are counted."""
        for key, payload in blocks:
            with self._lock:
                if self._queued_bytes + payload.nbytes > self._host.capacity:
                    self.disk.failures["queue_full"] += 1
                    continue
                self._queued_bytes += payload.nbytes
                self._queued.add(key)
            self._writer.submit(self._write, key, payload, namespace).add_done_callback(_log_error)

    def _write(self, key: bytes, payload: Payload, namespace: str) -> None:
        try:
            self.disk.write(key, payload, namespace)
        finally:
            with self._lock:
                self._queued_bytes -= payload.nbytes
                self._queued.discard(key)

    def read_ahead(self, keys: Sequence[bytes], namespace: str) -> Future[None]:
        """Read blocks of one sequence, in its order, up to the first that can't be read."""
        return self._reader.submit(self._read, keys, namespace)

    def _read(self, keys: Sequence[bytes], namespace: str) -> None:
        blocks: list[tuple[bytes, Payload]] = []
        for key in keys:
            if (payload := self.disk.read(key, namespace)) is None:
                break
            blocks.append((key, payload))
        self._host.put(blocks)

    def refresh_soon(self) -> None:
        """Look for blocks of other replicas, unless that was just done."""
        if time.monotonic() - self._refreshed_at > _REFRESH_S:
            self._refreshed_at = time.monotonic()
            self._reader.submit(self.disk.refresh).add_done_callback(_log_error)

    def flush(self) -> None:
        """Wait until all that waits is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write what waits and end the threads."""
        self._writer.shutdown()
        self._reader.shutdown()
        self.disk.close()


def _log_error(future: Future[None]) -> None:
    if (error := future.exception()) is not None:
        log.error("A disk tier failed", exc_info=error)
