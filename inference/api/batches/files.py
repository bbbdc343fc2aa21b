"""Files of a batch: its input lines, all checked before the first runs, and its result journals."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from django.conf import settings

from engine.contract.errors import InvalidRequest
from inference.web.json_body import parse_object


class JournalInUse(Exception):
    """Another process on this machine writes it."""


class ResultJournal:
    """A file of JSON lines that survives the worker that writes it.

    Opening it truncates a line that a killed worker left incomplete. A lock, which the kernel
    releases when its holder dies, excludes a second writer.

    Args:
        note: called with every line, including those that are in the file already.
    Attributes:
        custom_ids: of the lines in the file.
    Raises:
        JournalInUse: another process writes it.
    """

    def __init__(self, path: Path, on_line: Callable[[dict[str, Any]], None]) -> None:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._file: IO[bytes] = os.fdopen(handle, "a+b")
        self.path, self._on_line = path, on_line
        self.custom_ids: set[str] = set()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise JournalInUse(str(path)) from None
        self._recover()

    def _recover(self) -> None:
        self._file.seek(0)
        num_valid_bytes = 0
        for raw in self._file:
            try:
                line = json.loads(raw) if raw.endswith(b"\n") else None
            except ValueError:  # left by a machine that lost power: not a result
                line = None
            if not isinstance(line, dict):
                break
            self._replay_line(line)
            num_valid_bytes += len(raw)
        self._file.truncate(num_valid_bytes)

    def _replay_line(self, line: dict[str, Any]) -> None:
        self.custom_ids.add(line["custom_id"])
        self._on_line(line)

    def append(self, line: dict[str, Any]) -> None:
        """Add one line. The kernel has it when this returns, so killing the process loses nothing.

        Raises: OSError if the disk doesn't accept it; then none of it is written.
        """
        remaining = memoryview(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        previous_size = os.fstat(self._file.fileno()).st_size
        try:
            while remaining:
                remaining = remaining[os.write(self._file.fileno(), remaining) :]
        except OSError:
            os.ftruncate(self._file.fileno(), previous_size)
            raise
        self._replay_line(line)

    def merge(self, saved: Iterable[bytes], other_ids: Collection[str] = ()) -> None:
        """Add the lines that another machine wrote, except those whose `custom_id` is in this file
        or among `other_ids`.
        """
        for raw in saved:
            line = json.loads(raw)
            if line["custom_id"] not in self.custom_ids and line["custom_id"] not in other_ids:
                self.append(line)

    def read_from(self, offset: int) -> bytes:
        """The complete lines from an offset on. Blocks."""
        handle = self._file.fileno()
        content = os.pread(handle, os.fstat(handle).st_size - offset, offset)
        return content[: content.rfind(b"\n") + 1]

    def sync(self) -> None:
        """Flush the file to disk, so that a power loss loses nothing."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file and release the lock."""
        self._file.close()


#: Maximum number of errors that a failed batch lists.
MAX_ERRORS = 50
FIELDS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request's position in the file. Its body is read again when it runs."""

    custom_id: str
    offset: int
    length: int


def index_lines(file: IO[bytes], endpoint: str) -> tuple[list[BatchLine], list[dict[str, Any]]]:
    """The positions of all requests in the file, and its errors (also if it is empty). Blocks."""
    lines: list[BatchLine] = []
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    limit, longest = settings.QUIRE.max_batch_requests, settings.QUIRE.max_body_bytes
    offset = 0
    for number, raw in enumerate(_bounded_lines(file), start=1):
        line_offset, offset = offset, offset + len(raw)
        if not raw.strip() and len(raw) <= longest:
            continue
        if len(lines) >= limit:
            errors.append(_error(f"A batch may hold at most {limit} requests.", number))
            break
        try:
            custom_id = _check(raw, endpoint, seen)
        except InvalidRequest as error:
            errors.append(_error(error.message, number, error.param, error.code))
            if len(errors) >= MAX_ERRORS:
                break
            continue
        seen.add(custom_id)
        lines.append(BatchLine(custom_id, line_offset, len(raw)))
    if not lines and not errors:
        errors.append(_error("The file holds no request.", None))
    return lines, errors


def _bounded_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines; a line that is too long is read only so far as to detect that, and is the last."""
    limit = settings.QUIRE.max_body_bytes
    while raw := file.readline(limit + 2):
        yield raw
        if len(raw) > limit and not raw.endswith(b"\n"):
            return


def _error(
    message: str, line: int | None, param: str | None = None, code: str = "invalid_request"
) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}


def _check(raw: bytes, endpoint: str, seen: set[str]) -> str:
    """The line's custom_id. Raises `InvalidRequest`."""
    request = parse_line(raw)
    for name in sorted(request.keys() - FIELDS):
        raise InvalidRequest(f"Unknown field {name[:50]!r}.", param=name[:50])
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= 512:
        raise InvalidRequest("custom_id must be 1 to 512 characters.", param="custom_id")
    if custom_id in seen:
        raise InvalidRequest(
            f"The custom_id {custom_id[:100]!r} occurs twice.",
            param="custom_id",
            code="duplicate_custom_id",
        )
    if request.get("method") != "POST":
        raise InvalidRequest("method must be 'POST'.", param="method")
    if request.get("url") != endpoint:
        raise InvalidRequest(f"url must be the batch's endpoint, {endpoint!r}.", param="url")
    body = request.get("body")
    if not isinstance(body, dict):
        raise InvalidRequest("body must be a JSON object.", param="body")
    for name in ("stream", "background"):
        if body.get(name):
            raise InvalidRequest(f"Requests of a batch can't set {name}.", param=f"body.{name}")
    return custom_id


def parse_line(raw: bytes) -> dict[str, Any]:
    """Parse a line as strictly as a request's body. Raises `InvalidRequest`."""
    max_bytes = settings.QUIRE.max_body_bytes
    if len(raw) > max_bytes:
        raise InvalidRequest(f"The line is longer than the limit of {max_bytes} bytes.")
    return parse_object(raw.strip())


def read_body(file: IO[bytes], line: BatchLine) -> dict[str, Any]:
    """The body of one request. Blocks; several threads may read at once."""
    body: dict[str, Any] = parse_line(os.pread(file.fileno(), line.length, line.offset))["body"]
    return body
