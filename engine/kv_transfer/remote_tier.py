"""`RemoteTier`: KV blocks in Redis or an S3-compatible store, which several machines share."""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

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

#: A store that takes longer to answer is left alone for a while.
TIMEOUT_S = 1.0
#: Blocks that are read at once, since each takes a round trip.
NUM_PARALLEL_READS = 8
#: Time without reads and writes after a store didn't answer.
_PAUSE_S = 10.0
#: After this time the store may have dropped a block that it had: it is written again.
#: A replica that only writes would never notice, and a block in constant use is written this often.
STORED_S = 60.0


class StoreError(Exception):
    """A store doesn't answer, or refuses; the message is for the log."""


class RemoteStore(ABC):
    """Records by key, all of the same length. Of the owner (see `BlockCipher.owner_tag`) that has
    the most, the least recently used are evicted.

    All methods but `close` raise `StoreError`, within `TIMEOUT_S` or a few times that.
    """

    @abstractmethod
    def get(self, key: bytes, owner: bytes) -> bytes | None:
        """An owner's record; None: there is none."""

    @abstractmethod
    def contains(self, key: bytes, owner: bytes) -> bool:
        """Whether an owner has a record."""

    @abstractmethod
    def set(self, key: bytes, owner: bytes, record: bytes) -> None:
        """Store an owner's record; others are evicted where the store's capacity requires it."""

    @abstractmethod
    def delete(self, key: bytes, owner: bytes) -> None:
        """Remove an owner's record, if there is one."""

    @abstractmethod
    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """Keys and records of all; reading them is no use of them."""

    @abstractmethod
    def clear(self) -> int:
        """Remove all records, but not the secret; the number of those removed."""

    @abstractmethod
    def get_secret(self, new_secret: bytes) -> bytes:
        """The store's secret; `new_secret` becomes it where there is none."""

    @abstractmethod
    def read_used_bytes(self) -> int:
        """Bytes of all records."""

    @abstractmethod
    def close(self) -> None:
        """Close connections."""


class RemoteTier(StorageTier):
    """Blocks in a `RemoteStore`, sealed as they are on disk. One that doesn't answer is left alone
    for a while; then blocks are neither read nor written.
    """

    name = "remote"
    is_indexed = False

    def __init__(self, store: RemoteStore, capacity: int, block_bytes: int) -> None:
        """The store isn't contacted yet: replicas start without it, too."""
        super().__init__(capacity)
        self._store, self._block_bytes = store, block_bytes
        self._cipher: BlockCipher | None = None
        self._paused_until = 0.0
        self._readers = ThreadPoolExecutor(NUM_PARALLEL_READS, "kv-remote")
        self._max_stored = capacity // record_bytes(block_bytes)
        #: When the store was last known to have a key, the last used last: at most as many as it
        #: holds.
        self._stored: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def is_paused(self) -> bool:
        """Whether the store is left alone."""
        return time.monotonic() < self._paused_until

    @property
    def digest(self) -> bytes:
        return b"" if self._cipher is None else self._cipher.digest

    def __contains__(self, key: bytes) -> bool:
        return time.monotonic() - self._stored.get(key, -math.inf) < STORED_S

    def may_contain(self, key: bytes) -> bool:
        return not self.is_paused

    def is_stored(self, key: bytes, tenant: str) -> bool:
        if self.is_paused:
            return False
        try:
            return self._store.contains(key, self._get_cipher().owner_tag(tenant))
        except StoreError as error:
            self._pause("read_error", error)
            return False

    def read(self, key: bytes, namespace: str, tenant: str = "") -> Payload | None:
        if self.is_paused:
            return None
        try:
            cipher = self._get_cipher()
            record = self._store.get(key, cipher.owner_tag(tenant))
        except StoreError as error:
            self._pause("read_error", error)
            return None
        payload = None
        if record is not None:
            try:
                payload = _open_record(cipher, key, record, namespace)
            except UnusableBlock as error:
                self.count_failure(error.reason)
        # What isn't there or can't be used is written again.
        self._record_stored(key, is_stored=payload is not None)
        return payload

    def read_sequence(
        self, keys: Sequence[bytes], namespace: str, source: str = "", tenant: str = ""
    ) -> Iterator[Payload]:
        reads: deque[Future[Payload | None]] = deque()
        remaining = iter(keys)
        try:
            while True:
                for key in itertools.islice(remaining, NUM_PARALLEL_READS - len(reads)):
                    reads.append(self._readers.submit(self.read, key, namespace, tenant))
                if not reads or (payload := reads.popleft().result()) is None:
                    return
                yield payload
        finally:
            for read in reads:
                read.cancel()

    def write(self, key: bytes, payload: Payload, namespace: str, tenant: str = "") -> bool:
        if key in self or self.is_paused:
            return False
        try:
            cipher = self._get_cipher()
            nonce, sealed = cipher.seal(key, payload, namespace)
            owner = cipher.owner_tag(tenant)
            header = RecordHeader.for_block(key, nonce, sealed, owner)
            self._store.set(key, owner, header.pack() + sealed)
        except StoreError as error:
            self._pause("write_error", error)
            return False
        self._record_stored(key, is_stored=True)
        return True

    def refresh(self) -> None:
        if self.is_paused:
            return
        try:
            self.used_bytes = self._store.read_used_bytes()
        except StoreError as error:
            self._pause("read_error", error)

    def measure_read(self) -> float:
        """Seconds that it takes to read a block; 0 where the store doesn't answer now."""
        key, payload = secrets.token_bytes(32), np.zeros(self._block_bytes, np.uint8)
        if not self.write(key, payload, ""):
            return 0.0
        started = time.perf_counter()
        self.read(key, "")
        seconds = time.perf_counter() - started
        self._record_stored(key, is_stored=False)
        try:
            self._store.delete(key, self._get_cipher().owner_tag(""))
        except StoreError as error:
            self._pause("write_error", error)
        return 0.0 if self.is_paused else seconds

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)
        self._store.close()

    def _get_cipher(self) -> BlockCipher:
        """The cipher with the store's secret. Raises `StoreError`."""
        if self._cipher is None:
            secret = self._store.get_secret(secrets.token_bytes(SECRET_BYTES))
            if len(secret) != SECRET_BYTES:
                # A short one could be guessed.
                raise StoreError(f"the secret has {len(secret)} bytes, not {SECRET_BYTES}")
            self._cipher = BlockCipher(secret, self._block_bytes)
        return self._cipher

    def _record_stored(self, key: bytes, *, is_stored: bool) -> None:
        with self._lock:
            self._stored.pop(key, None)
            if is_stored:
                self._stored[key] = time.monotonic()
                if len(self._stored) > self._max_stored:
                    self._stored.popitem(last=False)

    def _pause(self, reason: str, error: StoreError) -> None:
        self.count_failure(reason)
        if not self.is_paused:
            log.warning("The remote KV tier is left alone for %.0f s: %s", _PAUSE_S, error)
        self._paused_until = time.monotonic() + _PAUSE_S


def record_bytes(block_bytes: int) -> int:
    """Length of a block's record."""
    return HEADER.size + block_bytes + TAG_BYTES


def make_store(url: str, capacity: int, block_bytes: int) -> RemoteStore:
    """The store of a URL, for records of blocks of `block_bytes`.

    Raises `ConfigError` for a URL that can't be one, a capacity that is too small, or a client that
    isn't installed.
    """
    record_size = record_bytes(block_bytes)
    if capacity < record_size:
        raise ConfigError(
            f"kv_offloading_size must be at least {record_size / 2**30:.4f} for this model's "
            f"blocks of {block_bytes} bytes; got {capacity / 2**30:.4f}.",
            param="kv_offloading_size",
        )
    if url.startswith("s3://"):
        try:
            from engine.kv_transfer.s3_store import S3Store
        except ImportError as error:
            raise ConfigError(
                "kv_offloading_backend=s3://... needs boto3: pip install 'quire[s3]'.",
                param="kv_offloading_backend",
            ) from error
        return S3Store(url, capacity)
    from engine.kv_transfer.redis_store import RedisStore

    return RedisStore(url, capacity, record_size)


def _open_record(cipher: BlockCipher, key: bytes, record: bytes, namespace: str) -> Payload:
    """The block of a record. Raises `UnusableBlock`."""
    header = RecordHeader.unpack(record)
    if header.length != len(record) - HEADER.size:
        raise UnusableBlock("header")
    return cipher.open(key, header.nonce, record[HEADER.size :], namespace)


def verify_record(key: bytes, record: bytes) -> None:
    """Raise `UnusableBlock` unless the record is the one that was written under its key."""
    header = RecordHeader.unpack(record)
    header.verify(record[HEADER.size :])
    if header.key != key:
        raise UnusableBlock("authentication")
