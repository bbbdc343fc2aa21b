"""`StorageTier`: what the tiers outside of memory have in common; `BlockCipher` seals their blocks.

A sealed block is encrypted and authenticated by AES-GCM, with a key of its cache namespace; what is
authenticated covers the block's own key in the tier.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Self

import numpy as np
import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from engine.kv_transfer.block_buffers import Payload

#: Header of a block's record, before the sealed block: magic, that block's length, key, nonce,
#: checksum of these and of the sealed block, for readers without the tenant's key; and the owner.
HEADER = struct.Struct("<4sI32s12sQ4s")
_MAGIC = b"QKV2"
NONCE_BYTES = 12
TAG_BYTES = 16
OWNER_BYTES = 4
SECRET_BYTES = 32


class UnusableBlock(Exception):
    """A block can't be used, for a reason that is a label of the metrics."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RecordHeader(NamedTuple):
    """The beginning of a record. `length`: bytes of the sealed block after it; `owner`: see
    `BlockCipher.owner_tag`.
    """

    length: int
    key: bytes
    nonce: bytes
    checksum: int
    owner: bytes

    @classmethod
    def for_block(cls, key: bytes, nonce: bytes, sealed: bytes, owner: bytes) -> Self:
        return cls(len(sealed), key, nonce, _checksum(key, nonce, sealed), owner)

    @classmethod
    def unpack(cls, record: bytes) -> Self:
        """Read the beginning of `record`. Raises `UnusableBlock`."""
        if len(record) < HEADER.size:
            raise UnusableBlock("truncated")
        magic, *fields = HEADER.unpack_from(record)
        if magic != _MAGIC:
            raise UnusableBlock("header")
        return cls(*fields)

    def pack(self) -> bytes:
        """Bytes, `HEADER.size`."""
        return HEADER.pack(_MAGIC, *self)

    def verify(self, sealed: bytes) -> None:
        """Raise `UnusableBlock` unless the sealed block is the one that was written."""
        if len(sealed) != self.length:
            raise UnusableBlock("truncated")
        if _checksum(self.key, self.nonce, sealed) != self.checksum:
            raise UnusableBlock("checksum")


def _checksum(key: bytes, nonce: bytes, sealed: bytes) -> int:
    digest = xxhash.xxh3_64(key)
    digest.update(nonce)
    digest.update(sealed)
    return digest.intdigest()


class BlockCipher:
    """Seals blocks of `block_bytes`, and opens them."""

    def __init__(self, secret: bytes, block_bytes: int) -> None:
        """`secret`: the tier's part of all keys."""
        self._secret, self._block_bytes = secret, block_bytes

    @property
    def digest(self) -> bytes:
        """Sha256 of the tier's secret."""
        return hashlib.sha256(self._secret).digest()

    def seal(self, key: bytes, payload: Payload, namespace: str) -> tuple[bytes, bytes]:
        """A nonce, and the sealed block, which has `TAG_BYTES` more."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce, self._cipher(namespace).encrypt(nonce, payload.data, key)

    def open(self, key: bytes, nonce: bytes, sealed: bytes, namespace: str) -> Payload:
        """The block that was sealed under this key. Raises `UnusableBlock`."""
        if len(sealed) != self._block_bytes + TAG_BYTES:
            raise UnusableBlock("truncated")
        try:
            block = self._cipher(namespace).decrypt(nonce, sealed, key)
        except InvalidTag as error:
            raise UnusableBlock("authentication") from error
        payload: Payload = np.frombuffer(bytearray(block), dtype=np.uint8)
        return payload

    def owner_tag(self, tenant: str) -> bytes:
        """[OWNER_BYTES] by which a tenant's bytes are counted, and that don't tell its name."""
        return hmac.digest(self._secret, b"owner" + tenant.encode(), "sha256")[:OWNER_BYTES]

    def _cipher(self, namespace: str) -> AESGCM:
        """The cipher of a cache namespace. Its key needs the tier's secret and the namespace,
        which comes from the tenant's salt: once that is erased, nobody can read the blocks.
        """
        return AESGCM(hmac.digest(self._secret, namespace.encode(), "sha256"))


class StorageTier(ABC):
    """Blocks by key in a storage, within a number of bytes.

    One thread may write while others read and ask what there is.

    Attributes:
        name: label of the metrics.
        capacity: bytes.
        used_bytes: bytes that the storage takes, when they were last looked at.
        failures: number of blocks that couldn't be read or written, by reason.
        is_indexed: whether `may_contain` knows what is stored.
        address: tcp://HOST:PORT where other replicas read the blocks; "": they don't.
    """

    name: ClassVar[str]
    is_indexed: ClassVar[bool] = True
    address = ""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used_bytes = 0
        self.failures: Counter[str] = Counter()
        self._failures_lock = threading.Lock()

    def count_failure(self, reason: str) -> None:
        """Count a block that couldn't be read or written. Thread-safe."""
        with self._failures_lock:
            self.failures[reason] += 1

    @property
    @abstractmethod
    def digest(self) -> bytes:
        """Sha256 of the storage's secret, equal for all replicas that share it; b"": not known."""

    @abstractmethod
    def __contains__(self, key: bytes) -> bool:
        """Whether a block needn't be written."""

    @abstractmethod
    def may_contain(self, key: bytes) -> bool:
        """Whether a block is worth a try to read it."""

    def is_stored(self, key: bytes, tenant: str) -> bool:
        """Whether the storage has a tenant's block now; asks it where it isn't indexed."""
        return self.may_contain(key)

    @abstractmethod
    def read(self, key: bytes, namespace: str, tenant: str = "") -> Payload | None:
        """A tenant's block that is as it was written; None: there is none. One that can't be used
        is counted, and not tried again.
        """

    def read_sequence(
        self, keys: Sequence[bytes], namespace: str, source: str = "", tenant: str = ""
    ) -> Iterator[Payload]:
        """Blocks of a tenant's sequence, in its order, up to the first that can't be read.

        `source`: address of the replica that has them; "": they are in the storage.
        """
        for key in keys:
            if (payload := self.read(key, namespace, tenant)) is None:
                return
            yield payload

    def follow_sequence(
        self, keys: Sequence[bytes], namespace: str, source: str, is_computed: Callable[[], bool]
    ) -> Iterator[Payload]:
        """Blocks of a sequence that the replica `source` computes while `is_computed`, in its
        order, each as soon as it is there; fewer if they take too long. Tiers that replicas share
        read them later.
        """
        yield from ()

    @abstractmethod
    def write(self, key: bytes, payload: Payload, namespace: str, tenant: str = "") -> bool:
        """Store a tenant's block; whether it was stored. Failures are counted."""

    @abstractmethod
    def measure_read(self) -> float:
        """Seconds that it takes to read a block."""

    def lease(self, keys: Sequence[bytes]) -> None:  # noqa: B027
        """Another replica is about to read a sequence's blocks: don't delete them for a while."""

    def refresh(self) -> None:  # noqa: B027
        """Look for blocks that others have written or deleted."""

    def close(self) -> None:  # noqa: B027
        """Release files and connections."""
