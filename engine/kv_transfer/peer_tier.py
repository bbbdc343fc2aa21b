"""`PeerTier`: KV blocks in a replica's memory, which other replicas read by TCP.

A reader sends the number of keys and the keys, and gets the sealed blocks in their order up to the
first that isn't there. Blocks are sealed as they are on disk, by a key that follows from the cache
namespace: who doesn't know a tenant's namespace can neither ask for its blocks nor read them.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import numpy as np

from engine.contract.errors import ConfigError
from engine.kv_transfer.block_buffers import Payload
from engine.kv_transfer.host_tier import HostTier
from engine.kv_transfer.storage_queue import READ_TIMEOUT_S
from engine.kv_transfer.storage_tier import (
    NONCE_BYTES,
    TAG_BYTES,
    BlockCipher,
    StorageTier,
    UnusableBlock,
)

log = logging.getLogger(__name__)

#: How long blocks of a computed prompt are held for another replica to read them, and how long
#: either side waits for the other's next block: it may have died.
LEASE_S = 2.0
#: How often a peer that is computing a prompt is asked for its next blocks.
_FOLLOW_INTERVAL_S = 0.05
#: Number of readers that are served concurrently.
NUM_SENDERS = 8
#: Maximum number of keys of a request to a peer; blocks beyond it are computed.
MAX_KEYS = 65536

_KEY_BYTES = 32
COUNT = struct.Struct("<I")
#: A constant, as nothing is stored with it: the namespaces are the secrets.
_SECRET = b"quire peer tier"


class PeerTier(StorageTier):
    """Blocks in this replica's memory and, by their addresses, in others'."""

    name = "peer"

    def __init__(self, url: str, capacity: int, block_bytes: int, *, serves: bool) -> None:
        """
        Args:
            url: tcp://HOST:PORT, where others reach this replica; port 0: a free one.
            capacity: bytes of the blocks here.
            block_bytes: bytes of a block.
            serves: whether others may read this replica's blocks.

        Raises `ConfigError` for a URL that can't be listened at.
        """
        super().__init__(capacity)
        self._record_bytes = NONCE_BYTES + block_bytes + TAG_BYTES
        self._block_bytes = block_bytes
        self._cipher = BlockCipher(_SECRET, block_bytes)
        self._records = HostTier(capacity)
        self.failures = self._records.failures
        self._senders = ThreadPoolExecutor(NUM_SENDERS, "kv-send")
        self._is_closed = False
        self._server = listen(url, "kv_offloading_backend") if serves else None
        if self._server is not None:
            host, port = self._server.getsockname()[:2]
            self.address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
            arguments = (self._server,)
            threading.Thread(target=self._accept, args=arguments, daemon=True).start()

    @property
    def digest(self) -> bytes:
        return self._cipher.digest

    def __contains__(self, key: bytes) -> bool:
        return key in self._records

    def may_contain(self, key: bytes) -> bool:
        return key in self._records

    def read(self, key: bytes, namespace: str, tenant: str = "") -> Payload | None:
        if (record := self._records.get(key)) is None:
            return None
        try:
            return self._open(key, record.tobytes(), namespace)
        except UnusableBlock as error:
            self.count_failure(error.reason)
            return None

    def read_sequence(
        self, keys: Sequence[bytes], namespace: str, source: str = "", tenant: str = ""
    ) -> Iterator[Payload]:
        if not source:
            yield from super().read_sequence(keys, namespace)
            return
        try:
            yield from self._read_from(source, keys[:MAX_KEYS], namespace)
        except (OSError, UnusableBlock) as error:
            self._count_error(source, error)

    def follow_sequence(
        self, keys: Sequence[bytes], namespace: str, source: str, is_computed: Callable[[], bool]
    ) -> Iterator[Payload]:
        keys, last_at = keys[:MAX_KEYS], time.monotonic()
        try:
            while keys and is_computed():
                num_read = 0
                for payload in self._read_from(source, keys, namespace):
                    num_read += 1
                    yield payload
                keys, now = keys[num_read:], time.monotonic()
                if num_read:
                    last_at = now
                elif now - last_at > READ_TIMEOUT_S:
                    return  # it is far behind others
                time.sleep(_FOLLOW_INTERVAL_S)
        except (OSError, UnusableBlock) as error:
            self._count_error(source, error)

    def _read_from(self, source: str, keys: Sequence[bytes], namespace: str) -> Iterator[Payload]:
        """Blocks up to the first that a peer hasn't. Raises `OSError`, `UnusableBlock`."""
        url = urlsplit(source)
        with socket.create_connection((url.hostname or "", url.port or 0), LEASE_S) as peer:
            peer.sendall(COUNT.pack(len(keys)) + b"".join(keys))
            for key in keys:
                if not (record := receive(peer, self._record_bytes)):
                    return
                yield self._open(key, record, namespace)

    def _count_error(self, source: str, error: OSError | UnusableBlock) -> None:
        if isinstance(error, UnusableBlock):
            self.count_failure(error.reason)
            return
        log.warning("KV blocks can't be read from %s: %s", source, error)
        self.count_failure("read_error")

    def _open(self, key: bytes, record: bytes, namespace: str) -> Payload:
        """The block of a record. Raises `UnusableBlock`."""
        return self._cipher.open(key, record[:NONCE_BYTES], record[NONCE_BYTES:], namespace)

    def write(self, key: bytes, payload: Payload, namespace: str, tenant: str = "") -> bool:
        if key in self._records:
            return False
        nonce, sealed = self._cipher.seal(key, payload, namespace)
        self._records.put([(key, np.frombuffer(nonce + sealed, np.uint8))], tenant)
        self.used_bytes = self._records.used_bytes
        return key in self._records

    def lease(self, keys: Sequence[bytes]) -> None:
        self._records.lease(keys, LEASE_S)

    def measure_read(self) -> float:
        """Seconds that it takes to open a block; how far peers are isn't known."""
        nonce, sealed = self._cipher.seal(b"", np.zeros(self._block_bytes, np.uint8), "")
        started = time.perf_counter()
        self._cipher.open(b"", nonce, sealed, "")
        return time.perf_counter() - started

    def close(self) -> None:
        self._is_closed = True
        if self._server is not None:
            # Closing it alone wouldn't wake the thread that accepts.
            self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()
        self._senders.shutdown(cancel_futures=True)
        self._records.clear()

    def _accept(self, server: socket.socket) -> None:
        while not self._is_closed:
            try:
                peer, _ = server.accept()
                self._senders.submit(self._serve, peer)
            except (OSError, RuntimeError) as error:  # closed meanwhile, or out of descriptors
                if not self._is_closed:
                    log.warning("A replica that reads KV blocks can't be accepted: %s", error)
                    time.sleep(LEASE_S)

    def _serve(self, peer: socket.socket) -> None:
        """Send a peer the blocks that it asks for."""
        keys: list[bytes] = []
        try:
            with peer:
                keys = receive_keys(peer)
                leased_at = -LEASE_S
                for index, key in enumerate(keys):
                    if (now := time.monotonic()) > leased_at + LEASE_S / 2:
                        self._records.lease(keys[index:], LEASE_S)
                        leased_at = now
                    if self._is_closed or (record := self._records.get(key)) is None:
                        return
                    peer.settimeout(LEASE_S)
                    peer.sendall(record.data)
                    self._records.release([key])
        except OSError as error:
            log.warning("KV blocks can't be sent: %s", error)
            self.count_failure("write_error")
            # Else it asks again for those that aren't there yet: their leases end by themselves.
            self._records.release(keys)


def listen(url: str, param: str) -> socket.socket:
    """A socket that listens at tcp://HOST:PORT, as the setting `param` says. Raises
    `ConfigError`.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        if port is None or parts.path or parts.query or _is_wildcard(host):
            raise ValueError("it must be tcp://HOST:PORT, by which others reach this replica")
        (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server(address[:2], family=family)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{param}={url!r} can't be used: {error}.", param=param) from error


def _is_wildcard(host: str) -> bool:
    """Whether a host is none, or any address of a machine: others couldn't be told it."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a name


def receive(peer: socket.socket, num_bytes: int) -> bytes:
    """Read this many bytes, or fewer if the other side closes. Raises `OSError` after `LEASE_S`."""
    buffer = bytearray(num_bytes)
    view, position = memoryview(buffer), 0
    deadline = time.monotonic() + LEASE_S
    while position < num_bytes:
        if (remaining_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        peer.settimeout(remaining_s)
        if not (count := peer.recv_into(view[position:])):
            break
        position += count
    return bytes(view[:position])


def receive_keys(peer: socket.socket) -> list[bytes]:
    """The keys that a peer asks for. Raises `OSError`."""
    prefix = receive(peer, COUNT.size)
    count = COUNT.unpack(prefix)[0] if len(prefix) == COUNT.size else 0
    if count > MAX_KEYS:
        raise OSError(f"{count} blocks are more than the {MAX_KEYS} that one request may ask for")
    keys = receive(peer, count * _KEY_BYTES)
    return [keys[start : start + _KEY_BYTES] for start in range(0, len(keys), _KEY_BYTES)]
