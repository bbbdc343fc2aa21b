"""`KVAdmission`: reads a request's saved KV blocks into host memory before it is queued."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from engine.contract.errors import QuireError
from engine.kv_transfer.base import KVConnectorBase
from engine.kv_transfer.storage_queue import READ_TIMEOUT_S
from engine.scheduler.request import Request, Sequence, SequenceStatus

log = logging.getLogger(__name__)


class KVAdmission:
    """An `AdmissionGate` that requests without saved blocks pass at once.

    Attributes:
        connector: prefetches blocks; None: nothing is prefetched.
        num_late: number of requests whose blocks arrived too late.
    """

    def __init__(self, cached_prefix: Callable[[Sequence], tuple[int, bool]]) -> None:
        """`cached_prefix`: returns the number of a new sequence's tokens that are in the KV cache,
        and whether the encoder states that they attend to are missing.
        """
        self.connector: KVConnectorBase | None = None
        self.num_late = 0
        self._cached_prefix = cached_prefix
        #: Deadlines by request id.
        self._waiting: dict[str, tuple[Request, float]] = {}
        #: Requests whose blocks were read, and the error of reading them.
        self._read: queue.SimpleQueue[tuple[Request, BaseException | None]] = queue.SimpleQueue()

    @property
    def num_waiting(self) -> int:
        return sum(not request.finished for request, _ in self._waiting.values())

    @property
    def has_pending(self) -> bool:
        return bool(self._waiting)

    is_preparing = has_pending

    def admit(self, request: Request) -> bool:
        if self.connector is None:
            return True
        first = request.sequences[0]
        if not first.reads_cache:
            return True
        reading = self.connector.start_read_ahead(first, *self._cached_prefix(first))
        if reading is None:
            return True
        for sequence in request.sequences:
            sequence.status = SequenceStatus.WAITING_FOR_ADMISSION
        self._waiting[request.request_id] = (request, time.monotonic() + READ_TIMEOUT_S)
        reading.add_done_callback(partial(self._on_read, request))
        return False

    def follow_prefill(self, request: Request) -> None:
        """Read a request's blocks while a prefill replica computes them."""
        first = request.sequences[0]
        if self.connector is not None and first.reads_cache:
            self.connector.follow_prefill(first, self._cached_prefix(first)[0])

    def _on_read(self, request: Request, reading: Future[None]) -> None:
        self._read.put((request, reading.exception()))

    def poll_ready(self, timeout_s: float) -> list[tuple[Request, QuireError | None]]:
        ready: list[tuple[Request, QuireError | None]] = []
        while self._waiting:
            try:
                request, error = (
                    self._read.get(timeout=timeout_s) if timeout_s else (self._read.get_nowait())
                )
            except queue.Empty:
                break
            timeout_s = 0.0
            if error is not None:
                log.error("KV blocks couldn't be read", exc_info=error)
            self._release(request, ready)
        now = time.monotonic()
        for request, deadline in list(self._waiting.values()):
            if now > deadline:
                self.num_late += 1
                self._release(request, ready)
        return ready

    def _release(self, request: Request, ready: list[tuple[Request, QuireError | None]]) -> None:
        """Queue a request, unless it was late or aborted before."""
        waiting = self._waiting.get(request.request_id)
        if waiting is None or waiting[0] is not request:
            return
        del self._waiting[request.request_id]
        for sequence in request.sequences:
            if not sequence.finished:
                sequence.status = SequenceStatus.WAITING
        if not request.finished:
            ready.append((request, None))
