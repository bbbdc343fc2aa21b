"""`AdapterManager`: adapters on the device, the requests that use them, and those that wait.

Adapters load in threads while their requests wait and others run. An adapter stays on the device
while a request uses it, and then until its memory is needed. The least recently used one is evicted
first, those of owners above their share before others. Idle adapters are evicted after a while.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from engine.contract.errors import InvalidRequest, QuireError
from engine.contract.lora import AdapterRef, AdapterStatus, weights_file
from engine.contract.replica_state import EngineStats
from engine.lora.fetcher import AdapterFetcher
from engine.lora.store import AdapterFacts, AdapterHost
from engine.scheduler.request import Request, SequenceStatus

log = logging.getLogger(__name__)

#: Seconds without a request after which an adapter is evicted (reloading takes milliseconds to a
#: second), and after which an owner no longer counts.
IDLE_S = 600.0
#: Seconds between two scans for idle adapters.
_SCAN_INTERVAL_S = 5.0
#: While several owners have requests, one owner's adapters in use leave this fraction of bytes and
#: slots to the others, and at least one slot.
_RESERVED_PART = 4
#: Maximum number of evicted adapters whose state is still reported.
_MAX_REPORTED = 256
#: Maximum number of concurrent loads; more may start between two steps while their total size is
#: below this number of bytes, since they finish within a step.
_READERS, _AHEAD_BYTES = 2, 32 << 20
#: Maximum number of requests for loaded adapters that overtake one that waits for memory.
MAX_OVERTAKING = 256
#: Seconds for which the first admitted requests wait for others while nothing runs.
BATCHING_WINDOW_S = 0.01
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(slots=True)
class AdapterEntry:
    """An adapter that is on the device, being loaded, or evicted.

    Attributes:
        ref: the reference in the latest request.
        num_bytes: device memory; until it is loaded, the file's size.
        loading: result of the load; None once it is loaded.
        users: ids of the requests that use it.
        pinned: never evicted.
        unloading: evicted as soon as no request uses it or waits for it.
        used_at: the manager's clock at the latest request.
        last_used_at: monotonic seconds of the last use.
        vocab_size: vocabulary of its rows if it adds tokens; 0: the model's.
        changes_encoder: see `AdapterWeights`.
    """

    ref: AdapterRef
    num_bytes: int
    loading: Future[AdapterFacts] | None = None
    rank: int = 0
    load_seconds: float = 0.0
    users: set[str] = field(default_factory=set)
    pinned: bool = False
    unloading: bool = False
    used_at: int = 0
    last_used_at: float = field(default_factory=time.monotonic)
    vocab_size: int = 0
    changes_encoder: bool = False

    @property
    def is_free(self) -> bool:
        """Whether it may be evicted."""
        return self.loading is None and not self.users and not self.pinned


#: A request whose adapter is loaded, or its error.
Outcome = tuple[Request, QuireError | None]


class AdapterManager:
    """The adapters of one engine. Not thread-safe, except `states`.

    Attributes:
        capacity: bytes of device memory for adapters.
        fetcher: copies files to this machine; None: references have valid paths.
    """

    def __init__(self, host: AdapterHost) -> None:
        self._host, self._refusal = host, host.refusal
        self.capacity, self._max_adapters = host.num_bytes, host.max_adapters
        self.fetcher: AdapterFetcher | None = None
        self._entries: dict[str, AdapterEntry] = {}
        #: Evicted adapters, the latest last.
        self._departed: OrderedDict[str, AdapterEntry] = OrderedDict()
        self._waiting: dict[str, deque[Request]] = {}
        #: Requests for loaded adapters that yield to others, which wait for memory.
        self._deferred: list[Request] = []
        #: Monotonic seconds of each owner's latest request.
        self._last_request: dict[str, float] = {}
        self._last_scan = 0.0
        self._threads: ThreadPoolExecutor | None = None
        self._clock = 0
        self._overtaken = 0
        #: Adapters that operators load, and the futures of the loads.
        self._preloads: dict[str, tuple[AdapterRef, Future[None]]] = {}
        self._pinned: set[str] = set()
        self._num_loads = self._num_evictions = 0
        self._load_seconds = 0.0

    def check(self, ref: AdapterRef) -> None:
        """Raise `InvalidRequest` for an adapter that can never be used here."""
        if self._refusal:
            raise InvalidRequest(self._refusal, param="model")
        if not _DIGEST.fullmatch(ref.digest):
            raise InvalidRequest("An adapter's digest must be 64 hex digits.", param="model")

    def vocab_size(self, digest: str) -> int | None:
        """Vocabulary of an adapter that adds tokens, else 0; None while it isn't on the device."""
        entry = self._entries.get(digest)
        return None if entry is None or entry.loading is not None else entry.vocab_size

    def changes_encoder(self, digest: str) -> bool:
        """Whether an adapter on the device changes the encoding of images, sound or texts."""
        entry = self._entries.get(digest)
        return entry is not None and entry.changes_encoder

    @property
    def has_pending(self) -> bool:
        """Whether a later `poll_ready` may return requests."""
        loading = any(entry.loading is not None for entry in self._entries.values())
        return bool(self._waiting or self._deferred or self._preloads) or loading

    @property
    def loading_adapters(self) -> Iterator[Request]:
        """Return requests whose adapter is being loaded."""
        for digest, entry in self._entries.items():
            if entry.loading is not None:
                yield from self._waiting.get(digest, ())

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for their adapter."""
        return len(self._deferred) + sum(map(len, self._waiting.values()))

    def admit(self, request: Request) -> bool:
        """Admit a request; False if it must wait for its adapter.

        Raises `InvalidRequest` for an adapter larger than the capacity that pinned ones leave.
        """
        ref = request.message.adapter
        if ref is None:
            return True
        self._last_request[ref.owner] = time.monotonic()
        entry = self._entries.get(ref.digest)
        loaded = entry is not None and entry.loading is None
        can_use = entry is not None and loaded and self._can_use(entry, ref.owner)
        if entry is not None and can_use and self._can_overtake(ref.owner):
            self._use(entry, request)
            return True
        if entry is None:
            self._check_size(_file_bytes(ref), ref)
        for sequence in request.sequences:
            sequence.status = SequenceStatus.WAITING_FOR_ADMISSION
        if can_use:
            self._deferred.append(request)
            return False
        self._waiting.setdefault(ref.digest, deque()).append(request)
        self._begin_loads()
        return False

    def _can_overtake(self, owner: str) -> bool:
        """Whether an owner's request for a loaded adapter may overtake requests without memory."""
        if not self._must_yield(owner):
            self._overtaken = 0
            return True
        self._overtaken += 1
        return self._overtaken <= MAX_OVERTAKING

    def _must_yield(self, owner: str) -> bool:
        """Whether requests of owners that use no more memory than this one wait for memory."""
        used = self._bytes_by_owner(in_use=True)
        return any(used[other] <= used[owner] for other, _ in self._missing(self._waiting))

    def _missing(self, digests: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield owner and digest of adapters that aren't loaded, but within their owner's share."""
        allowed: dict[str, bool] = {}
        for digest in digests:
            if digest not in self._entries:
                owner = self._ref_of(digest).owner
                if owner not in allowed:
                    allowed[owner] = self._within_share(owner)
                if allowed[owner]:
                    yield owner, digest

    def _within_share(self, owner: str) -> bool:
        """Whether an owner may use one more adapter. A single owner may use all memory; several
        leave each other a part, so that long-running requests of one don't lock the others out.
        """
        sizes = [
            entry.num_bytes
            for entry in self._entries.values()
            if entry.ref.owner == owner and (entry.users or entry.loading)
        ]
        earliest = time.monotonic() - IDLE_S
        request_times = (
            requested_at for other, requested_at in self._last_request.items() if other != owner
        )
        if not sizes or not any(requested_at > earliest for requested_at in request_times):
            return True
        slots = self._max_adapters
        if slots is not None and len(sizes) >= slots - max(1, slots // _RESERVED_PART):
            return False
        return sum(sizes) < self.capacity - self.capacity // _RESERVED_PART

    def _can_use(self, entry: AdapterEntry, owner: str) -> bool:
        """Whether an owner's request may use a loaded adapter."""
        return bool(entry.users) or self._within_share(owner)

    def _resume_waiting(self) -> None:
        """Queue deferred requests again that no longer have to yield to others."""
        deferred, self._deferred = self._deferred, []
        waits: dict[str, bool] = {}
        for request in deferred:
            ref = request.message.adapter
            if ref is not None and ref.owner not in waits:
                waits[ref.owner] = self._must_yield(ref.owner)
            if ref is None or waits[ref.owner]:
                self._deferred.append(request)
            else:
                self._waiting.setdefault(ref.digest, deque()).append(request)

    def poll_ready(self, timeout_s: float) -> list[Outcome]:
        """Return requests whose adapter is loaded, or their errors.

        Waits up to `timeout_s` for the first, and then `BATCHING_WINDOW_S` for others.
        """
        loading = [entry.loading for entry in self._entries.values() if entry.loading is not None]
        if loading and timeout_s:
            wait(loading, timeout_s, FIRST_COMPLETED)
            wait(loading, min(timeout_s, BATCHING_WINDOW_S))
        ready: list[Outcome] = []
        for digest, entry in list(self._entries.items()):
            if entry.loading is not None and entry.loading.done():
                ready += self._end_load(digest, entry, entry.loading)
        self._resume_waiting()
        ready += self._admit_waiting()
        ready += self._reject_oversized()
        self._begin_loads()
        if all(entry.loading is None for entry in self._entries.values()):
            self.close()  # idle threads would otherwise live as long as the process
        return ready

    def _end_load(
        self, digest: str, entry: AdapterEntry, done: Future[AdapterFacts]
    ) -> list[Outcome]:
        """Finish a load; return the requests that fail with it."""
        try:
            facts = done.result()
        except Exception as error:  # fails the requests of this adapter only
            log.warning("The adapter %s can't be loaded: %s", digest[:12], error)
            del self._entries[digest]
            refusal = InvalidRequest(f"The adapter can't be loaded: {error!r}.", param="model")
            return self._reject(digest, error if isinstance(error, QuireError) else refusal)
        entry.loading, entry.rank, entry.num_bytes = None, facts.rank, facts.num_bytes
        entry.vocab_size, entry.load_seconds = facts.vocab_size, facts.load_seconds
        entry.changes_encoder = facts.changes_encoder
        entry.last_used_at = time.monotonic()
        self._num_loads += 1
        self._load_seconds += facts.load_seconds
        if (preload := self._preloads.pop(digest, None)) is not None:
            preload[1].set_result(None)
        self._unload(digest)
        return []

    def _reject(self, digest: str, refusal: QuireError) -> list[Outcome]:
        """Fail all requests and preloads that wait for an adapter."""
        self._pinned.discard(digest)
        if (preload := self._preloads.pop(digest, None)) is not None:
            preload[1].set_exception(refusal)
        return [(request, refusal) for request in self._waiting.pop(digest, ())]

    def _reject_oversized(self) -> list[Outcome]:
        """Fail requests whose adapter no longer fits, because others were pinned meanwhile."""
        rejected: list[Outcome] = []
        waiting = {*self._preloads, *self._waiting} if self._pinned else set()
        for digest in waiting - self._entries.keys():
            ref = self._ref_of(digest)
            try:
                self._check_size(_file_bytes(ref), ref)
            except InvalidRequest as refusal:
                rejected += self._reject(digest, refusal)
        return rejected

    def _admit_waiting(self) -> Iterator[Outcome]:
        """Yield waiting requests whose adapter is loaded."""
        for digest in list(self._waiting):
            entry, owner = self._entries.get(digest), self._ref_of(digest).owner
            if entry is not None and entry.loading is None and self._can_use(entry, owner):
                for request in self._waiting.pop(digest):
                    self._use(entry, request)
                    yield request, None

    def _use(self, entry: AdapterEntry, request: Request) -> None:
        self._clock += 1
        entry.used_at = self._clock
        entry.users.add(request.request_id)
        if request.message.adapter is not None:
            entry.ref = request.message.adapter

    def release(self, request: Request) -> None:
        """Remove a request that has left the engine."""
        ref = request.message.adapter
        if ref is None:
            return
        if (entry := self._entries.get(ref.digest)) is not None:
            entry.users.discard(request.request_id)
            entry.last_used_at = time.monotonic()
        if request in self._deferred:
            self._deferred.remove(request)
        queue = self._waiting.get(ref.digest)
        if queue is not None and request in queue:
            queue.remove(request)
            if not queue:
                del self._waiting[ref.digest]
        self._unload(ref.digest)
        if self._waiting:
            self._begin_loads()

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory in use or reserved by loads."""
        return sum(entry.num_bytes for entry in list(self._entries.values()))

    def _begin_loads(self) -> None:
        """Start loads of waiting adapters as far as memory allows."""
        while (digest := self._next()) is not None:
            ref = self._ref_of(digest)
            size = _file_bytes(ref)
            loading = [entry.num_bytes for entry in self._entries.values() if entry.loading]
            if len(loading) >= _READERS and sum(loading) + size > _AHEAD_BYTES:
                return
            if not self._evict_until_fits(size, ref.owner):
                return
            self._begin(ref, size)

    def _next(self) -> str | None:
        """Return the next adapter to load: the oldest of the owner that uses the least memory."""
        used = self._bytes_by_owner(in_use=True)
        preloads = ((self._ref_of(d).owner, d) for d in self._preloads if d not in self._entries)
        missing = chain(preloads, self._missing(self._waiting))
        first = min(missing, key=lambda adapter: used[adapter[0]], default=None)
        return None if first is None else first[1]

    def _ref_of(self, digest: str) -> AdapterRef:
        queue = self._waiting.get(digest)
        ref = queue[0].message.adapter if queue else None
        return ref or self._preloads[digest][0]

    def _begin(self, ref: AdapterRef, size: int) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix="adapters")
        self._clock += 1
        entry = AdapterEntry(ref, size, self._threads.submit(self._load, ref), used_at=self._clock)
        entry.pinned = ref.digest in self._pinned
        self._departed.pop(ref.digest, None)
        self._entries[ref.digest] = entry

    def _load(self, ref: AdapterRef) -> AdapterFacts:
        if self.fetcher is None:
            return self._host.load(ref)
        return self.fetcher.load(ref, self._host.load)

    def _evict_until_fits(self, size: int, owner: str) -> bool:
        """Evict unused adapters until one of `size` bytes fits; return False if it can't."""
        while self.num_bytes + size > self.capacity or (
            self._max_adapters is not None and len(self._entries) >= self._max_adapters
        ):
            victim = self._victim(owner)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _victim(self, owner: str) -> str | None:
        """Return the least recently used adapter, preferring owners above their share."""
        free = {digest: entry for digest, entry in self._entries.items() if entry.is_free}
        used = self._bytes_by_owner()
        share = self.capacity / max(1, len(used.keys() | {owner}))
        exceeding = {d: entry for d, entry in free.items() if used[entry.ref.owner] > share}
        candidates = exceeding or free
        return min(candidates, key=lambda digest: candidates[digest].used_at, default=None)

    def _evict(self, digest: str) -> None:
        entry = self._departed[digest] = self._entries.pop(digest)
        entry.unloading = False
        self._num_evictions += 1
        self._host.unload(digest)
        for old in list(self._departed)[:-_MAX_REPORTED]:
            if not self._host.has_host_copy(old):
                del self._departed[old]

    def _bytes_by_owner(self, *, in_use: bool = False) -> Counter[str]:
        used = Counter[str]()
        for entry in self._entries.values():
            if not (in_use and entry.is_free):
                used[entry.ref.owner] += entry.num_bytes
        return used

    def _check_size(self, size: int, ref: AdapterRef) -> None:
        if size > self.capacity:
            raise InvalidRequest(
                f"The adapter {ref.name!r} needs {size} bytes, but this replica holds "
                f"{self.capacity} bytes of adapters.",
                param="model",
            )
        pinned = [entry for entry in self._entries.values() if entry.pinned]
        remaining = self.capacity - sum(entry.num_bytes for entry in pinned)
        if size > remaining or (
            self._max_adapters is not None and len(pinned) >= self._max_adapters
        ):
            raise InvalidRequest(
                f"There is no room for the adapter {ref.name!r}: others are pinned.", param="model"
            )

    def preload(self, ref: AdapterRef, *, pin: bool) -> Future[None]:
        """Load an adapter without a request; `pin`: never evict it.

        The future completes once it is loaded, or has the error. Raises `InvalidRequest` for an
        adapter that can never be used here.
        """
        self.check(ref)
        if ref.digest not in self._entries:
            self._check_size(_file_bytes(ref), ref)
        (self._pinned.add if pin else self._pinned.discard)(ref.digest)
        entry = self._entries.get(ref.digest)
        if entry is not None:
            entry.pinned, entry.unloading = pin, False
        _, done = self._preloads.setdefault(ref.digest, (ref, Future()))
        if entry is not None and entry.loading is None:
            del self._preloads[ref.digest]
            done.set_result(None)
        self._begin_loads()
        return done

    def unload(self, digest: str) -> bool:
        """Evict an adapter as soon as no request uses it or waits for it, unless `preload` is
        called before. Return False if it isn't on the device.
        """
        self._pinned.discard(digest)
        if (preload := self._preloads.pop(digest, None)) is not None:
            preload[1].set_exception(InvalidRequest("The adapter was unloaded.", param="model"))
        entry = self._entries.get(digest)
        if entry is None:
            return False
        entry.pinned, entry.unloading = False, True
        self._unload(digest)
        return True

    def _unload(self, digest: str) -> None:
        """Evict an adapter that is being unloaded, unless a request needs it."""
        entry = self._entries.get(digest)
        if entry is None or not (entry.unloading and entry.is_free) or digest in self._waiting:
            return
        if not any(request.message.adapter_digest == digest for request in self._deferred):
            self._evict(digest)

    def drop_idle(self) -> None:
        """Evict all unused adapters."""
        for digest in [digest for digest, entry in self._entries.items() if entry.is_free]:
            self._evict(digest)

    def evict_idle(self, now: float) -> None:
        """Evict adapters, and copies in host memory, that no request has used for `IDLE_S`.

        `now`: monotonic seconds. Cheap enough to call between steps.
        """
        if now - self._last_scan < _SCAN_INTERVAL_S:
            return
        self._last_scan = now
        self._last_request = {
            owner: requested_at
            for owner, requested_at in self._last_request.items()
            if now - requested_at < IDLE_S
        }
        for digest, entry in list(self._entries.items()):
            if entry.is_free and now - entry.last_used_at >= IDLE_S:
                self._evict(digest)
        for digest, entry in self._departed.items():
            if now - entry.last_used_at >= IDLE_S:
                self._host.drop_host_copy(digest)

    def states(self) -> list[AdapterStatus]:
        """Return the states of all adapters on the device, in host memory or on disk."""
        departed = [
            (entry, "host" if self._host.has_host_copy(digest) else "disk")
            for digest, entry in list(self._departed.items())[-_MAX_REPORTED:]
        ]
        entries = [
            (entry, "disk" if entry.loading is not None else "device")
            for entry in list(self._entries.values())
        ]
        return [
            AdapterStatus(
                digest=entry.ref.digest,
                name=entry.ref.name,
                rank=entry.rank,
                tier=tier,
                num_bytes=entry.num_bytes,
                pinned=entry.pinned,
                num_running=len(entry.users),
                num_waiting=len(self._waiting.get(entry.ref.digest, ())),
                load_seconds=entry.load_seconds,
            )
            for entry, tier in entries + departed
        ]

    def fill_stats(self, stats: EngineStats) -> None:
        """Fill in the metrics of adapters."""
        stats.adapter_bytes, stats.adapter_capacity_bytes = self.num_bytes, self.capacity
        stats.adapter_slots = self._max_adapters or 0
        stats.adapter_loads_total = self._num_loads
        stats.adapter_load_seconds_total = self._load_seconds
        stats.adapter_evictions_total = self._num_evictions

    def close(self) -> None:
        """Stop the loader threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None


def _file_bytes(ref: AdapterRef) -> int:
    path = Path(ref.path)
    try:
        return (path if path.is_file() else weights_file(path)).stat().st_size
    except OSError:
        return ref.num_bytes
