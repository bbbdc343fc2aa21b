"""Background writer of the request log: a thread in every process that admits requests.

Rows go into a bounded queue that is written once a second. A killed process loses its last second,
and a long database outage the oldest rows: bills come from the ledger alone.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import cast

from asgiref.sync import async_to_sync
from django.db import DatabaseError, InterfaceError, close_old_connections

from common.db import ROW_ERRORS
from common.loops import LoopThread
from common.messaging import broadcast
from metering.request_log import Content, RequestRow, RequestTrace, insert_rows
from metering.retention import trim_requests
from metering.usage_record import UsageRecord

#: Maximum number of refusals of one kind, per process and window, that get their own row.
MAX_LOGGED_PER_WINDOW = 10
WINDOW_S = 60.0
#: Maximum age of the row that stands for the others: building it for each would cost too much.
LAST_EVERY_S = 1.0
#: With more kinds than this, refusals are grouped by tenant and reason alone.
MAX_KINDS = 1000

Kind = tuple[int, int | None, str, int, str]


@dataclass(slots=True)
class _Window:
    began: float
    count: int = 0
    last: RequestRow | None = None
    last_at: float = -math.inf


class RejectionSampler:
    """Samples refusals; `keep` is called with the rows to write.

    A kind is a tenant, key, endpoint, status and code. A flood of one kind takes at most
    `MAX_LOGGED_PER_WINDOW` + 1 rows a minute in each process.
    """

    def __init__(
        self, keep: Callable[[RequestRow], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keep, self._clock = keep, clock
        self._lock = threading.Lock()
        self._windows: dict[Kind, _Window] = {}

    def add(self, kind: Kind, make: Callable[[], RequestRow]) -> None:
        """Count a refused request; `make` is called only if it is stored. Thread-safe."""
        with self._lock:
            if kind not in self._windows and len(self._windows) >= MAX_KINDS:
                kind = (kind[0], None, "", *kind[3:])
            now = self._clock()
            window = self._windows.get(kind)
            if window is None or now - window.began >= WINDOW_S:
                self._end(window)
                window = self._windows[kind] = _Window(now)
            window.count += 1
            if window.count <= MAX_LOGGED_PER_WINDOW:
                self._keep(make())
            elif now - window.last_at >= LAST_EVERY_S:
                window.last, window.last_at = make(), now

    def sweep(self, *, all_of_them: bool = False) -> None:
        """Write a summary row for each kind whose window has ended."""
        with self._lock:
            now = self._clock()
            for kind, window in list(self._windows.items()):
                if all_of_them or now - window.began >= WINDOW_S:
                    del self._windows[kind]
                    self._end(window)

    def _end(self, window: _Window | None) -> None:
        """One row for the refusals without their own."""
        if window is not None and window.last is not None:
            last = window.last
            self._keep(RequestRow(last.record, last.trace, window.count - MAX_LOGGED_PER_WINDOW))


logger = logging.getLogger(__name__)

#: Maximum number of rows that wait in a process while the database is down.
MAX_PENDING = 10_000
EVERY_S = 1.0
#: Maximum number of rows per transaction.
PART = 500
#: A tenant's oldest rows are deleted each time this many new ones were written.
TRIM_EVERY = 1000

_waiting: deque[RequestRow | Content] = deque(maxlen=MAX_PENDING)
_written: Counter[int] = Counter()
_refusals = RejectionSampler(_waiting.append)


def log_request(record: UsageRecord, trace: RequestTrace) -> None:
    """Log a finished request. Returns at once; thread-safe."""
    _waiting.append(RequestRow(record, trace))


def log_rejection(kind: Kind, make: Callable[[], tuple[UsageRecord, RequestTrace]]) -> None:
    """Log a request that was refused before it ran; only a sample of each kind is built."""
    _refusals.add(kind, lambda: RequestRow(*make()))


def log_content(content: Content) -> None:
    """Queue a request's prompt and output, for a tenant that stores them."""
    _waiting.append(content)


def write_waiting(*, at_once: bool = False) -> int:
    """Write the queued rows; returns how many. `at_once`: also refusals of the current window.

    Raises DatabaseError; rows that couldn't be written stay queued.
    """
    _refusals.sweep(all_of_them=at_once)
    written, newest = 0, dict[int, float]()
    while _waiting:
        part = [_waiting.popleft() for _ in range(min(PART, len(_waiting)))]
        try:
            _insert(part)
        except BaseException:
            _waiting.extendleft(reversed(part[: MAX_PENDING - len(_waiting)]))
            raise
        written += len(part)
        for item in part:
            if isinstance(item, RequestRow):
                record = item.record
                started_at = cast(datetime, record.started_at).timestamp()
                newest[record.tenant_id] = max(started_at, newest.get(record.tenant_id, 0.0))
        _prune_tenant(part)
    if newest:
        async_to_sync(_announce)(newest)
    return written


async def _announce(newest: dict[int, float]) -> None:
    """Notify pages that show the tenant's requests: the topic `requests`."""
    for tenant_id, started_at in newest.items():
        await broadcast("requests", {"newest": started_at}, tenant_id=tenant_id)


def _insert(part: list[RequestRow | Content]) -> None:
    try:
        insert_rows(part)
    except ROW_ERRORS as error:
        if len(part) == 1:
            logger.error("a record of a request was dropped: no database takes it", exc_info=error)
            return
        for item in part:  # one at a time, so that one bad row doesn't block the others
            _insert([item])


def _prune_tenant(part: list[RequestRow | Content]) -> None:
    for item in part:
        tenant = item.record.tenant_id if isinstance(item, RequestRow) else item.tenant_id
        _written[tenant] += 1
        if _written[tenant] >= TRIM_EVERY:
            _written[tenant] = 0
            trim_requests(tenant)


class RequestLogWriter(LoopThread):
    """Writes until stopped."""

    def __init__(self) -> None:
        super().__init__("quire-requests")

    def loop(self) -> None:
        stopping = late = False
        while not stopping:
            stopping = self.stopping.wait(EVERY_S)
            try:
                written = write_waiting(at_once=stopping)
            except (DatabaseError, InterfaceError) as error:
                if stopping:
                    logger.warning("records of %d requests are lost: %s", len(_waiting), error)
                elif not late:
                    text = "records of %d requests wait and are tried again every second: %s"
                    logger.warning(text, len(_waiting), error)
                late = True
                close_old_connections()
                continue
            if late:
                logger.warning("records of %d requests that waited are written", written)
            late = False
        close_old_connections()


_writer: RequestLogWriter | None = None


def start_writer() -> None:
    """Start this process's writer, unless it is running."""
    global _writer
    if _writer is None or not _writer.is_alive():
        _writer = RequestLogWriter()
        _writer.start()


def stop_writer() -> None:
    """Stop it after writing the queued rows. May block."""
    global _writer
    if _writer is not None:
        _writer.stop()
        _writer = None
