"""Standard error of a replica: copied to ours, and its last lines stored in Redis.

Operators can read them in the console, whichever node the replica ran on.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import redis

from engine.contract import redis_keys

#: Maximum number of lines per replica, and their lifetime after the last one.
MAX_LINES = 2000
RETENTION_S = 7 * 24 * 3600
#: Maximum length of a line, far above the longest of a traceback.
MAX_LINE_CHARS = 4000
FLUSH_S = 0.25
FIELD = b"t"


@dataclass(frozen=True)
class LogLine:
    """A line. `id`: its position, to continue reading from; `at`: seconds since the epoch."""

    id: str
    at: float
    text: str


class ReplicaLog:
    """The end of one replica's output in Redis; threads may share it."""

    def __init__(self, client: redis.Redis, prefix: str, replica_id: str) -> None:
        self._redis, self._key = client, redis_keys.log_key(replica_id, prefix)
        self._waiting: deque[str] = deque(maxlen=MAX_LINES)
        self._lock = threading.Lock()

    def write(self, text: str) -> None:
        """Add a line of the supervisor's."""
        self.add(f"-- {text}")
        self.flush()

    def add(self, line: str) -> None:
        """Queue a line for the next `flush`."""
        with self._lock:
            self._waiting.append(line[:MAX_LINE_CHARS])

    def flush(self) -> bool:
        """Write the queued lines, and return whether they are written. While Redis is down, the
        last `MAX_LINES` stay queued.
        """
        with self._lock:
            lines = list(self._waiting)
            self._waiting.clear()
        if not lines:
            return True
        try:
            with self._redis.pipeline(transaction=False) as pipe:
                for line in lines:
                    fields: Any = {FIELD: line.encode("utf-8", "replace")}
                    pipe.xadd(self._key, fields, maxlen=MAX_LINES, approximate=True)
                pipe.expire(self._key, RETENTION_S)
                pipe.execute()
        except (redis.RedisError, OSError):
            with self._lock:  # keep their order, so that the oldest are dropped first
                newer = list(self._waiting)
                self._waiting.clear()
                self._waiting.extend([*lines, *newer])
            return False
        return True

    def forward(self, fd: int) -> None:
        """Start a thread that copies a process's output until it ends, and then closes it."""
        threading.Thread(target=self._pump, args=(fd,), name="replica-log", daemon=True).start()

    def _pump(self, fd: int) -> None:
        rest = b""
        try:
            while True:
                if select.select([fd], [], [], FLUSH_S)[0]:
                    data = os.read(fd, 1 << 16)
                    if not data:
                        break
                    _show(data)
                    *lines, rest = (rest + data).split(b"\n")
                    # A progress bar rewrites its line; its last state is enough.
                    rest = rest.rpartition(b"\r")[2][-4 * MAX_LINE_CHARS :]
                    for line in lines:
                        self.add(_text(line))
                self.flush()
        finally:
            os.close(fd)
            if rest:
                self.add(_text(rest))
            while not self.flush():  # a replica that isn't started again writes no more
                time.sleep(FLUSH_S)


def _show(data: bytes) -> None:
    """Copy to our standard error. A closed or full one doesn't stop the replica."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


def read_log(
    client: redis.Redis,
    prefix: str,
    replica_id: str,
    *,
    after: str = "",
    max_lines: int = MAX_LINES,
) -> list[LogLine]:
    """The newest lines, oldest first; with `after` only those after that id.

    Raises redis.RedisError, also for an invalid `after`.
    """
    key = redis_keys.log_key(replica_id, prefix)
    entries: Any = client.xrevrange(key, min=f"({after}" if after else "-", count=max_lines)
    return [_decode_line(entry_id, fields) for entry_id, fields in reversed(entries)]


def _decode_line(entry_id: bytes, fields: dict[bytes, bytes]) -> LogLine:
    name = entry_id.decode()
    text = fields.get(FIELD, b"").decode("utf-8", "replace")
    return LogLine(name, int(name.partition("-")[0]) / 1000, text)
