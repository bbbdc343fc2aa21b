"""`DiskTier`: KV blocks in a folder, which the replicas of one machine share.

Blocks are appended to segments, files of a fixed size that are allocated whole before anything is
written to them. So the bytes of all segments are those that the folder takes, and it is within its
budget at every moment: before a segment is allocated, those used least recently are deleted. A
segment has one writer, which holds a lock on it; the next process goes on with one that a killed
writer has left.

Where the budget is short, a tenant with more than an equal share writes to segments of its own,
which are deleted first: it can't push out what others have within theirs. Segments that are
being written can't be deleted, and each process writes two of them: with many processes too few are
left to keep the shares.

A block's header is written after it, so a block is there whole or not at all; one that isn't, after
a power failure, fails its authentication.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.contract.errors import ConfigError
from engine.kv_transfer.block_buffers import Payload
from engine.kv_transfer.storage_tier import (
    HEADER,
    SECRET_BYTES,
    TAG_BYTES,
    BlockCipher,
    RecordHeader,
    StorageTier,
    UnusableBlock,
)

log = logging.getLogger(__name__)

SUFFIX = ".kv"
#: The budget in segments: as many as eight processes that write two each leave enough of.
NUM_SEGMENTS = 128
#: Time without writes after the disk was full.
_FULL_PAUSE_S = 10.0


class Location(NamedTuple):
    """An encrypted block: file name of its segment, offset and length there, nonce."""

    segment: str
    offset: int
    length: int
    nonce: bytes


class DiskTier(StorageTier):
    """Blocks in a folder. Attributes: folder: where the segments are."""

    name = "disk"

    def __init__(self, folder: Path, capacity: int, block_bytes: int) -> None:
        """Make the folder where there is none, and index its blocks.

        Raises `ConfigError` for a folder that can't be written, or a capacity that is too small
        for blocks of `block_bytes`.
        """
        super().__init__(capacity)
        self.folder, self._block_bytes = folder, block_bytes
        self._segment_bytes = capacity // NUM_SEGMENTS
        record_bytes = HEADER.size + block_bytes + TAG_BYTES
        if record_bytes > self._segment_bytes:
            min_gib = NUM_SEGMENTS * record_bytes / 2**30
            raise ConfigError(
                f"kv_offloading_size must be at least {min_gib:.4f} for this model's blocks of "
                f"{block_bytes} bytes; got {capacity / 2**30:.4f}.",
                param="kv_offloading_size",
            )
        self._index: dict[bytes, Location] = {}
        #: By name of a segment, the end of its indexed blocks.
        self._ends: dict[str, int] = {}
        #: Where blocks with damaged headers begin: segment and offset.
        self._damaged: set[tuple[str, int]] = set()
        #: By name of a segment, the bytes of each owner's blocks.
        self._owners: dict[str, Counter[bytes]] = {}
        self._owner_bytes: Counter[bytes] = Counter()
        self._index_lock = threading.Lock()
        #: Descriptor and name of the segments that are written: those of tenants within an equal
        #: share, and those of others.
        self._writers: dict[bool, tuple[int, str]] = {}
        self._paused_until = 0.0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._cipher = BlockCipher(self._read_secret(), block_bytes)
        except OSError as error:
            raise ConfigError(
                f"kv_offloading_backend {str(folder)!r} can't be used: {error}",
                param="kv_offloading_backend",
            ) from error
        self.refresh()

    @property
    def digest(self) -> bytes:
        return self._cipher.digest

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def may_contain(self, key: bytes) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    def keys(self) -> list[bytes]:
        """Keys of all indexed blocks."""
        return list(self._index)

    def refresh(self) -> None:
        with self._index_lock:
            sizes = {name: size for name, size, _ in self._segments()}
            self.used_bytes = sum(sizes.values())
            if gone := self._ends.keys() - sizes.keys():
                for name in gone:
                    del self._ends[name]
                    self._owner_bytes -= self._owners.pop(name, Counter())
                self._index = {
                    key: location
                    for key, location in self._index.items()
                    if location.segment not in gone
                }
            for name, size in sorted(sizes.items()):
                self._scan(name, size)

    def _scan(self, name: str, size: int) -> None:
        """Index the blocks of a segment that aren't indexed yet."""
        offset = self._ends.setdefault(name, 0)
        if offset + HEADER.size > size:
            return
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            while (header := _read_header(descriptor, offset, size)) is not None:
                start = offset + HEADER.size
                self._index[header.key] = Location(name, start, header.length, header.nonce)
                self._count_bytes(name, header.owner, HEADER.size + header.length)
                offset = start + header.length
        except UnusableBlock as error:
            # Where the next block begins isn't known. New blocks may overwrite those behind it.
            if (name, offset) not in self._damaged:
                self._damaged.add((name, offset))
                self.count_failure(error.reason)
        finally:
            os.close(descriptor)
        self._ends[name] = offset

    def read(self, key: bytes, namespace: str, tenant: str = "") -> Payload | None:
        if (location := self._index.get(key)) is None:
            return None
        try:
            return self._open(key, location, namespace)
        except UnusableBlock as error:
            self.count_failure(error.reason)
            self.forget(key)
            return None

    def forget(self, key: bytes) -> None:
        """A block can't be used: it isn't read again, and may be written again."""
        with self._index_lock:
            self._index.pop(key, None)

    def _open(self, key: bytes, location: Location, namespace: str) -> Payload:
        """Read and decrypt a block. Raises `UnusableBlock`."""
        path = self.folder / location.segment
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                sealed = os.pread(descriptor, location.length, location.offset)
            finally:
                os.close(descriptor)
            os.utime(path)  # the least recently used segment is deleted first
        except FileNotFoundError as error:
            raise UnusableBlock("deleted") from error
        except OSError as error:
            log.warning("A KV block of %s can't be read: %s", path, error)
            raise UnusableBlock("read_error") from error
        return self._cipher.open(key, location.nonce, sealed, namespace)

    def measure_read(self) -> float:
        """Seconds that it takes to read a block from the device, not from the page cache; 0 where
        none can be written for that: those that are there can be read all the same.
        """
        nonce, sealed = self._cipher.seal(b"", np.zeros(self._block_bytes, np.uint8), "")
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(sealed)
                file.flush()
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                started = time.perf_counter()
                self._cipher.open(b"", nonce, os.pread(file.fileno(), len(sealed), 0), "")
                return time.perf_counter() - started
        except OSError as error:
            log.warning("Reading from %s can't be measured: %s", self.folder, error)
            return 0.0

    def _count_bytes(self, segment: str, owner: bytes, num_bytes: int) -> None:
        self._owners.setdefault(segment, Counter())[owner] += num_bytes
        self._owner_bytes[owner] += num_bytes

    def _exceeds_share(self, owner: bytes) -> bool:
        """Whether an owner has more than an equal share of the budget."""
        return self._owner_bytes[owner] * len(self._owner_bytes) > self.capacity

    def _is_excess_segment(self, segment: str) -> bool:
        """Whether a segment has only blocks of owners with more than an equal share."""
        owners = tuple(self._owners.get(segment, ()))  # a reader may add others meanwhile
        return bool(owners) and all(map(self._exceeds_share, owners))

    def write(self, key: bytes, payload: Payload, namespace: str, tenant: str = "") -> bool:
        if key in self._index or time.monotonic() < self._paused_until:
            return False
        nonce, sealed = self._cipher.seal(key, payload, namespace)
        try:
            owner, num_bytes = self._cipher.owner_tag(tenant), HEADER.size + len(sealed)
            descriptor, name, offset = self._reserve(num_bytes, self._exceeds_share(owner))
            start = offset + HEADER.size
            _write_all(descriptor, sealed, start)
            _write_all(descriptor, RecordHeader.for_block(key, nonce, sealed, owner).pack(), offset)
        except OSError as error:
            log.warning("KV blocks can't be written to %s: %s", self.folder, error)
            self.count_failure("disk_full" if isinstance(error, DiskFull) else "write_error")
            self._paused_until = time.monotonic() + _FULL_PAUSE_S
            self.close()
            return False
        with self._index_lock:
            if self._ends.get(name) == offset:  # a refresh of another thread hasn't indexed it
                self._ends[name] = start + len(sealed)
                self._count_bytes(name, owner, num_bytes)
                self._index[key] = Location(name, start, len(sealed), nonce)
        return True

    def _reserve(self, num_bytes: int, is_excess: bool) -> tuple[int, str, int]:
        """A segment with so many free bytes: its descriptor, its name and where they begin.
        `is_excess`: they are for an owner with more than an equal share.

        Raises `OSError`, `DiskFull` among them.
        """
        if (writer := self._writers.get(is_excess)) is not None:
            descriptor, name = writer
            offset = self._ends.get(name)
            is_deleted = os.fstat(descriptor).st_nlink == 0
            if not is_deleted and offset is not None and offset + num_bytes <= self._segment_bytes:
                return descriptor, name, offset
            os.close(self._writers.pop(is_excess)[0])
        with self._locked():
            self.refresh()
            writer = self._adopt_segment(num_bytes, is_excess) or self._new_segment()
        descriptor, name = self._writers[is_excess] = writer
        return descriptor, name, self._ends.setdefault(name, 0)

    def _adopt_segment(self, num_bytes: int, is_excess: bool) -> tuple[int, str] | None:
        """A segment with free bytes that has no writer."""
        for name, size, _ in self._segments():
            if size != self._segment_bytes or self._ends.get(name, size) + num_bytes > size:
                continue
            if self._is_excess_segment(name) != is_excess:
                continue
            descriptor = os.open(self.folder / name, os.O_RDWR)
            if _lock(descriptor):
                return descriptor, name
            os.close(descriptor)
        return None

    def _new_segment(self) -> tuple[int, str]:
        """Allocate a segment, deleting others where the budget requires it."""
        segments = sorted(
            self._segments(),
            key=lambda segment: (not self._is_excess_segment(segment[0]), segment[2]),
        )
        used_bytes = sum(size for _, size, _ in segments)
        for name, size, _ in segments:
            if used_bytes + self._segment_bytes <= self.capacity:
                break
            if self._delete(name):
                used_bytes -= size
        if used_bytes + self._segment_bytes > self.capacity:
            raise DiskFull("all segments are being written")
        self.refresh()
        name = f"{time.time_ns():020d}-{secrets.token_hex(4)}{SUFFIX}"
        path = self.folder / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _lock(descriptor)
            os.posix_fallocate(descriptor, 0, self._segment_bytes)
        except OSError as error:
            path.unlink()
            os.close(descriptor)
            raise DiskFull(str(error)) from error
        self.used_bytes += self._segment_bytes
        return descriptor, name

    def _delete(self, name: str) -> bool:
        """Delete a segment that isn't being written."""
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY)
        except FileNotFoundError:
            return True
        try:
            if not _lock(descriptor):
                return False
            (self.folder / name).unlink()
            return True
        finally:
            os.close(descriptor)

    def close(self) -> None:
        while self._writers:
            os.close(self._writers.popitem()[1][0])

    def _segments(self) -> list[tuple[str, int, int]]:
        """(name, bytes, time of the last use in ns) of the folder's segments, oldest first."""
        segments = []
        for entry in sorted(os.scandir(self.folder), key=lambda entry: entry.name):
            if entry.name.endswith(SUFFIX):
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue  # another process has deleted it
                segments.append((entry.name, status.st_size, status.st_mtime_ns))
        return segments

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Within it no other process allocates or deletes segments."""
        with (self.folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read_secret(self) -> bytes:
        """The folder's part of all keys, made by the first process."""
        path = self.folder / "secret"
        with self._locked():
            # After a power failure it may be empty, and an empty secret is everyone's.
            if not path.exists() or path.stat().st_size != SECRET_BYTES:
                temporary = path.with_suffix(".new")
                temporary.write_bytes(secrets.token_bytes(SECRET_BYTES))
                temporary.chmod(0o600)
                temporary.rename(path)
            return path.read_bytes()


class DiskFull(OSError):
    """There is no space for another segment."""


def _lock(descriptor: int) -> bool:
    """Lock a segment while it is open. Returns whether nothing else holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _read_header(descriptor: int, offset: int, size: int) -> RecordHeader | None:
    """Header of the block at an offset; None: there is none.

    Raises `UnusableBlock` for a damaged one.
    """
    data = os.pread(descriptor, HEADER.size, offset)
    if len(data) < HEADER.size or not any(data):
        return None
    header = RecordHeader.unpack(data)
    if offset + HEADER.size + header.length > size:
        raise UnusableBlock("header")
    return header


def verify_segment(path: Path) -> Iterator[tuple[int, str]]:
    """(bytes, why it can't be used or "") of each record of a segment.

    Nothing is known of records after one whose header is damaged.
    """
    offset, size = 0, path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while (header := _read_header(descriptor, offset, size)) is not None:
            start = offset + HEADER.size
            reason = ""
            try:
                header.verify(os.pread(descriptor, header.length, start))
            except UnusableBlock as error:
                reason = error.reason
            yield HEADER.size + header.length, reason
            offset = start + header.length
    except UnusableBlock as error:
        yield HEADER.size, error.reason
    finally:
        os.close(descriptor)
