"""`NixlConnector`: reads KV blocks out of another replica's KV cache, by the package `nixl`.

A reader sends the keys of a prompt's blocks by TCP, as those of `PeerTier` do, and gets where the
blocks are in the other's memory, with their checksums. It reads them by NIXL into its own KV cache
and compares. Their lease is the connection: it ends when the reader closes it, or hasn't written to
it for `LEASE_S`. What was overwritten since then fails its checksum, and is computed.

Only who knows a tenant's cache namespace can ask for its blocks. But NIXL encrypts nothing, and who
has an answer can read the whole KV cache: it is for networks of the replicas' own.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import queue
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from engine.contract.errors import ConfigError
from engine.contract.replica_state import EngineStats
from engine.kv_cache.kv_cache_config import KVCacheConfig
from engine.kv_transfer.base import (
    KVCaches,
    KVConnectorBase,
    KVConnectorMetadata,
    PlanView,
    RequestView,
)
from engine.kv_transfer.block_buffers import BlockBuffers
from engine.kv_transfer.block_keys import BlockKeys
from engine.kv_transfer.peer_tier import (
    COUNT,
    LEASE_S,
    MAX_KEYS,
    NUM_SENDERS,
    listen,
    receive,
    receive_keys,
)
from engine.kv_transfer.storage_queue import READ_TIMEOUT_S

log = logging.getLogger(__name__)

#: How often a transfer is asked whether it is done. It takes milliseconds.
_POLL_S = 0.0005
#: Maximum bytes of an offer: some for each key, and the agent's metadata.
_MAX_OFFER_BYTES = 64 << 20


class _Offer(msgspec.Struct):
    """Where a reader finds blocks.

    Attributes:
        agent: NIXL's metadata of the agent.
        regions: by tensor, its address and the bytes of a block in it.
        block_ids: of the first blocks that were asked for, up to one that isn't here.
        checksums: theirs, XXH3-128 with `seed`, 16 bytes each.
    """

    agent: bytes
    regions: list[tuple[int, int]]
    block_ids: list[int]
    seed: int
    checksums: list[bytes]


class NixlLoad(msgspec.Struct):
    """A request's blocks that a step begins to read from the replica `source`."""

    request_id: str
    source: str
    keys: list[bytes]
    block_ids: list[int]


class NixlMetadata(KVConnectorMetadata):
    """Attributes: loads: those that the step begins."""

    loads: list[NixlLoad]


@dataclass(slots=True)
class _Lease:
    """Blocks of an ended request that others may read."""

    keys: list[bytes]
    deadline: float
    num_readers: int = 0


class _StillReadingError(Exception):
    """NIXL may still write into blocks."""


class NixlConnector(KVConnectorBase):
    """Holds the blocks of prompts that others decode, and reads those that others computed.

    Attributes:
        num_read_blocks: number of blocks that were read, and whose checksums were right.
        address: see `KVConnectorBase`.
    """

    metadata_type = NixlMetadata
    address = ""

    def __init__(
        self,
        identity: bytes,
        layout: KVCacheConfig,
        block_size: int,
        *,
        saves: bool,
        loads: bool,
        host: str = "127.0.0.1",
        port: int = 0,
        backends: Sequence[str] = ("UCX",),
    ) -> None:
        """
        Args:
            identity: what determines a block's bytes, except its tokens, namespace and adapter.
            layout: the KV cache groups: one, of full attention.
            block_size: tokens of a block.
            saves: whether others may read blocks.
            loads: whether others' blocks are read.
            host, port: where others reach this replica; port 0: a free one.
            backends: NIXL's.

        Raises `ImportError` without the package, `ConfigError` for backends that it hasn't and for
        an address that can't be listened at.
        """
        nixl = importlib.import_module("nixl._api")
        self._identity, self._layout, self._block_size = identity, layout, block_size
        self._saves, self._loads = saves, loads
        settings = nixl.nixl_agent_config(
            backends=list(backends), sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        try:
            self._agent = nixl.nixl_agent(f"quire-{uuid.uuid4().hex}", settings)
        except Exception as error:  # those of NIXL
            raise ConfigError(
                f"NIXL can't use backends={list(backends)}: {error}.", param="kv_transfer_config"
            ) from error
        self._registered: Any = None
        #: By their metadata, the names of other replicas' agents.
        self._agent_names: dict[bytes, str] = {}
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        #: By key, the blocks of the requests with a lease: prompts may begin alike.
        self._blocks: dict[bytes, dict[str, int]] = {}
        self._starting: list[NixlLoad] = []
        #: Requests whose blocks were read, and the ids of those that weren't.
        self._received: queue.SimpleQueue[tuple[str, list[int]]] = queue.SimpleQueue()
        self._failed: set[int] = set()
        self.num_read_blocks = 0
        # Two pools: replicas that read from each other would wait for each other's threads.
        self._senders = ThreadPoolExecutor(NUM_SENDERS, "nixl-send")
        self._readers = ThreadPoolExecutor(NUM_SENDERS, "nixl-read")
        self._is_closed = False
        self._server = listen(f"tcp://{host}:{port}", "kv_transfer_config") if saves else None
        if self._server is not None:
            host, port = self._server.getsockname()[:2]
            self.address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
            threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()

    @property
    def key_space(self) -> str:
        return hashlib.sha256(b"nixl" + self._digest).hexdigest() if self._identity else ""

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        tensors = {tensor.data_ptr(): tensor for layer in kv_caches.values() for tensor in layer}
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
        self._registered = self._agent.register_memory(list(tensors.values()))
        self._regions = [
            (address, tensor[0].numel() * tensor.element_size())
            for address, tensor in tensors.items()
        ]
        [device] = {tensor.get_device() for tensor in tensors.values()}
        self._memory, self._device_id = ("DRAM", 0) if device < 0 else ("VRAM", device)
        self._buffers = BlockBuffers(kv_caches, self._layout)
        self._layout_description = msgspec.json.encode(BlockBuffers.describe(kv_caches))
        self._make_keys()

    def _make_keys(self) -> None:
        settings = msgspec.json.encode([self._block_size, self._memory])
        identity = self._identity or secrets.token_bytes(32)
        self._digest = hashlib.sha256(identity + settings + self._layout_description).digest()
        self._keys = BlockKeys(self._digest, self._layout, self._block_size, [1])

    # -- blocks that others read ----------------------------------------------------------------

    def request_finished(
        self, request: RequestView, block_ids: list[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        params, num_tokens = request.kv_transfer_params or {}, request.num_prompt_tokens
        # With a token, the step that computed the prompt's end is over.
        is_computed = bool(block_ids) and len(request.token_ids) > num_tokens
        if not (self._saves and params.get("do_remote_decode") and is_computed):
            return False, None
        # As many as a reader asks for: it computes at least a token.
        hashes = request.block_hashes.values[: (num_tokens - 1) // self._block_size]
        keys = [self._keys.first_key(block_hash) for block_hash in hashes]
        if not keys:
            return False, None
        with self._lock:
            lease = _Lease(keys, time.monotonic() + LEASE_S)
            self._leases[request.request_id] = lease
            for key, block_id in zip(keys, block_ids[0], strict=False):
                self._blocks.setdefault(key, {})[request.request_id] = block_id
        return True, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        sent, received, now = set(), set(), time.monotonic()
        with self._lock:
            for request_id, lease in list(self._leases.items()):
                if not lease.num_readers and now > lease.deadline:
                    del self._leases[request_id]
                    sent.add(request_id)
                    for key in lease.keys:
                        if holders := self._blocks.get(key):  # none after a reset
                            holders.pop(request_id, None)
                            if not holders:
                                del self._blocks[key]
        while not self._received.empty():
            request_id, failed = self._received.get()
            received.add(request_id)
            self._failed.update(failed)
        return sent, received

    def _accept(self, server: socket.socket) -> None:
        while not self._is_closed:
            try:
                self._senders.submit(self._serve, server.accept()[0])
            except (OSError, RuntimeError) as error:  # closed meanwhile, or out of descriptors
                if not self._is_closed:
                    log.warning("A replica that reads KV blocks can't be accepted: %s", error)
                    time.sleep(LEASE_S / 2)  # less than readers wait

    def _serve(self, peer: socket.socket) -> None:
        """Tell a reader where its blocks are, and hold them until it has read them."""
        keys: list[bytes] = []
        leases: dict[str, _Lease] = {}
        try:
            with peer:
                keys = receive_keys(peer)
                block_ids, leases = self._lease(keys)
                offer = msgspec.msgpack.encode(self._make_offer(block_ids))
                peer.settimeout(LEASE_S)
                peer.sendall(COUNT.pack(len(offer)) + offer)
                while block_ids and receive(peer, 1):
                    pass  # it still reads
        except OSError as error:
            log.warning("The reader of %d KV blocks is gone: %s", len(keys), error)
        except Exception:  # those of NIXL
            log.exception("KV blocks can't be offered")
        finally:
            with self._lock:
                for lease in leases.values():
                    lease.num_readers -= 1
                    # A prompt that only begins like this one has a reader of its own.
                    if lease.keys[-1] == keys[-1]:
                        lease.deadline = 0.0

    def _lease(self, keys: Sequence[bytes]) -> tuple[list[int], dict[str, _Lease]]:
        """The ids of the first of these blocks, up to one that isn't here, and their leases."""
        block_ids: list[int] = []
        leases: dict[str, _Lease] = {}
        with self._lock:
            for key in keys:
                if (holders := self._blocks.get(key)) is None:
                    break
                request_id, block_id = next(iter(holders.items()))
                block_ids.append(block_id)
                leases[request_id] = self._leases[request_id]
            for lease in leases.values():
                lease.num_readers += 1
        return block_ids, leases

    def _make_offer(self, block_ids: list[int]) -> _Offer:
        if not block_ids:
            return _Offer(b"", [], [], 0, [])
        seed = secrets.randbits(64)
        checksums = [self._checksum(block_id, seed) for block_id in block_ids]
        metadata = self._agent.get_agent_metadata()
        return _Offer(metadata, self._regions, block_ids, seed, checksums)

    def _checksum(self, block_id: int, seed: int) -> bytes:
        [payload] = self._buffers.read(0, block_id)
        return xxhash.xxh3_128_digest(payload.data, seed)

    # -- blocks of others -----------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not (self._loads and request.prefilled and request.kv_peer):
            return 0, False
        size = self._block_size
        end = min(len(request.token_ids) - 1, num_computed_tokens + MAX_KEYS * size) // size
        return max(0, end * size - num_computed_tokens), True

    def update_state_after_alloc(
        self, request: RequestView, block_ids: list[list[int]], num_external_tokens: int
    ) -> None:
        if not num_external_tokens:
            return
        end = request.num_computed_tokens // self._block_size
        first = end - num_external_tokens // self._block_size
        hashes = request.block_hashes.hash_full_blocks(request.token_ids, self._block_size)
        keys = [self._keys.first_key(block_hash) for block_hash in hashes[first:end]]
        self._starting.append(
            NixlLoad(request.request_id, request.kv_peer, keys, block_ids[0][first:end])
        )

    def build_connector_meta(
        self, plan: PlanView, scheduled: Sequence[RequestView]
    ) -> NixlMetadata | None:
        loads, self._starting = self._starting, []
        return NixlMetadata(loads) if loads else None

    def start_load_kv(self, forward_context: Any = None, **kwargs: Any) -> None:
        if isinstance(self._metadata, NixlMetadata):
            for load in self._metadata.loads:
                self._readers.submit(self._load, load)

    def _load(self, load: NixlLoad) -> None:
        """Read a request's blocks, and say which couldn't be read."""
        num_read = 0
        try:
            num_read = self._read(load)
        except _StillReadingError:
            log.exception("NIXL can't end a transfer: its blocks are never used again")
            return
        except Exception:  # also those of NIXL
            log.exception("KV blocks can't be read from %s", load.source)
        self.num_read_blocks += num_read
        self._received.put((load.request_id, load.block_ids[num_read:]))

    def _read(self, load: NixlLoad) -> int:
        """Read blocks; returns how many of the first are right."""
        host, _, port = load.source.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), LEASE_S) as peer:
            peer.sendall(COUNT.pack(len(load.keys)) + b"".join(load.keys))
            length = COUNT.unpack(receive(peer, COUNT.size))[0]
            if length > _MAX_OFFER_BYTES:
                raise OSError(f"an offer of {length} bytes is too long")
            offer = msgspec.msgpack.decode(receive(peer, length), type=_Offer)
            if not offer.block_ids:
                return 0
            if [size for _, size in offer.regions] != [size for _, size in self._regions]:
                raise OSError("the other replica's blocks have other sizes")
            self._transfer(offer, load.block_ids[: len(offer.block_ids)], peer)
        for index, block_id in enumerate(load.block_ids[: len(offer.block_ids)]):
            if self._checksum(block_id, offer.seed) != offer.checksums[index]:
                log.warning("A KV block of %s has changed while it was read", load.source)
                return index
        return len(offer.block_ids)

    def _transfer(self, offer: _Offer, block_ids: list[int], peer: socket.socket) -> None:
        """Read an offer's blocks into these. Raises `OSError`, `_StillReadingError`, and what NIXL
        raises.
        """
        agent = self._agent
        with self._lock:
            if (name := self._agent_names.get(offer.agent)) is None:
                name = self._agent_names[offer.agent] = agent.add_remote_agent(offer.agent)
        local, remote = (
            agent.get_xfer_descs(
                [
                    (address + size * block_id, size, self._device_id)
                    for address, size in regions
                    for block_id in ids
                ],
                self._memory,
            )
            for regions, ids in ((self._regions, block_ids), (offer.regions, offer.block_ids))
        )
        handle = agent.initialize_xfer("READ", local, remote, name)
        try:
            state, deadline = agent.transfer(handle), time.monotonic() + READ_TIMEOUT_S
            while state == "PROC" and time.monotonic() < deadline:
                peer.sendall(b"\0")  # extends the lease; fails if the other side is gone
                time.sleep(_POLL_S)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise OSError(f"NIXL's transfer has ended with {state}")
        finally:
            self._release(handle)

    def _release(self, handle: Any) -> None:
        """Release a transfer, ended or not. Raises `_StillReadingError`."""
        deadline = time.monotonic() + LEASE_S
        while True:
            try:
                self._agent.release_xfer_handle(handle)
                return
            except Exception as error:  # one that isn't over is canceled first
                if time.monotonic() > deadline:
                    raise _StillReadingError from error
            time.sleep(_POLL_S)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def fill_stats(self, stats: EngineStats) -> None:
        stats.external_prefix_cache_hits_total = self.num_read_blocks * self._block_size

    def reset_cache(self) -> None:
        self._identity = b""  # for instance blocks of other weights, which others may have
        self._make_keys()
        with self._lock:
            self._blocks.clear()

    def shutdown(self) -> None:
        self._is_closed = True
        if self._server is not None:
            self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()
        for threads in (self._senders, self._readers):
            threads.shutdown(cancel_futures=True)
