"""`AdapterManager`: which adapters are on the device, who uses them, who waits for one.

An adapter is loaded beside the steps, while its requests wait and the others run. It stays as long
as a request uses it, and longer until its room is wanted: then the one that was used longest ago
goes first, of those owners first that hold more than their share. What nobody asks for any more
leaves by itself.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Self

import msgspec

from engine.contract.errors import InvalidRequest, QuireError
from engine.contract.lora import WEIGHTS_FILE, AdapterRef, AdapterStatus, digest_of
from engine.contract.replica_state import EngineStats
from engine.lora.store import AdapterFacts, AdapterHost
from engine.scheduler.request import Request, SequenceStatus

# -- `AdapterEntry`: an adapter in an engine's pool.


@dataclass(slots=True)
class AdapterEntry:
    """An adapter on the device, or on its way there.

    Attributes:
        ref: as it was asked for last.
        num_bytes: of device memory; before it is there, what its file has.
        loading: what comes of it; None once it's there.
        users: ids of requests that go through it.
        pinned: never driven out.
        unloading: it leaves as soon as nobody uses it.
        used_at: the pool's clock when it was asked for last.
        left_at: monotonic seconds when it was used last.
        vocab_size: of its rows, where it brings tokens; 0: the model's.
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
    left_at: float = field(default_factory=time.monotonic)
    vocab_size: int = 0

    @property
    def is_free(self) -> bool:
        """Whether its room may be had."""
        return self.loading is None and not self.users and not self.pinned


# -- `OwnerShares`: how much of an engine's memory for adapters each owner may have in use.


#: Seconds without a request after which an adapter's memory is given back, which takes milliseconds
#: to a second to read again, and after which an owner isn't counted any more.
IDLE_S = 600.0
#: While several owners ask, the part that one's adapters in use leave to the others: of bytes, and
#: of places, one of them at least.
_LEFT = 4


class OwnerShares:
    """Who asked lately. One owner may use all that there is; several leave each other a part, so
    that a flood of one's adapters, however long their requests run, doesn't keep another's out.
    """

    def __init__(self) -> None:
        #: When each owner asked last, in monotonic seconds.
        self._asked: dict[str, float] = {}

    def note(self, owner: str) -> None:
        """An owner's request came."""
        self._asked[owner] = time.monotonic()

    def forget(self, now: float) -> None:
        """Owners that asked long ago aren't remembered."""
        self._asked = {owner: at for owner, at in self._asked.items() if now - at < IDLE_S}

    def max_bytes(
        self, owner: str, in_use: Iterable[AdapterEntry], capacity: int, most: int | None
    ) -> bool:
        """Whether an owner may have one more beside those that it has in use.

        `capacity`: bytes. `most`: adapters; None: as many as fit.
        """
        now = time.monotonic()
        if all(now - at >= IDLE_S for other, at in self._asked.items() if other != owner):
            return True
        sizes = [entry.num_bytes for entry in in_use]
        if not sizes:
            return True
        places = most is None or len(sizes) < most - max(1, most // _LEFT)
        return places and sum(sizes) < capacity - capacity // _LEFT


# -- `HostTierRecords`: adapters that left the device, as far as something is still told of them.


#: Adapters that left the device, of which something is still told.
_MOST_REMEMBERED = 256


class HostTierRecords:
    """Which of them host memory still has, until nobody has asked for them for long.

    Args:
        holds: whether host memory has an adapter still: it makes room for later ones.
        forget: lets what host memory has of an adapter go; None: it keeps none.
    """

    def __init__(
        self, holds: Callable[[str], bool] | None, forget: Callable[[str], None] | None
    ) -> None:
        self._holds, self._forget = holds, forget
        self._known: dict[str, AdapterStatus] = {}
        #: What is in host memory, and when it was used last.
        self._in_host: dict[str, float] = {}

    def add(self, entry: AdapterEntry, *, in_host: bool) -> None:
        """An adapter has left the device; of those, the last hundreds are remembered."""
        digest = entry.ref.digest
        if in_host:
            self._in_host[digest] = entry.left_at
        self._known.pop(digest, None)
        self._known[digest] = AdapterStatus(
            digest=digest,
            name=entry.ref.name,
            rank=entry.rank,
            tier="host" if in_host else "disk",
            num_bytes=entry.num_bytes,
            load_seconds=entry.load_seconds,
        )
        while len(self._known) > _MOST_REMEMBERED:
            del self._known[next(iter(self._known))]
        if self._holds is not None:
            for other in [each for each in self._in_host if not self._holds(each)]:
                self._left_host(other)

    def restore(self, digest: str) -> None:
        """An adapter is on its way to the device again."""
        self._in_host.pop(digest, None)

    def give_back_idle(self, now: float) -> None:
        """Let those leave host memory that no request has used for long; `now`: monotonic."""
        for digest, left_at in list(self._in_host.items()):
            if now - left_at >= IDLE_S:
                self._left_host(digest)
                if self._forget is not None:
                    self._forget(digest)

    def states(self, here: Container[str]) -> list[AdapterStatus]:
        """All that are remembered, but for those on the device."""
        return [each for each in list(self._known.values()) if each.digest not in here]

    def _left_host(self, digest: str) -> None:
        del self._in_host[digest]
        if (known := self._known.get(digest)) is not None:
            self._known[digest] = msgspec.structs.replace(known, tier="disk")


log = logging.getLogger(__name__)

#: Adapters that are read at the same time. Between two steps as many more are begun as have these
#: bytes in all: they are read during one, and nobody stands long behind them.
_READERS, _AHEAD_BYTES = 2, 32 << 20
#: Requests for loaded adapters that may pass one that waits for room.
MAX_OVERTAKING = 256
#: Seconds that the first one waits for others where nothing runs: a step of a few takes as long as
#: one of all.
BATCHING_WINDOW_S = 0.01
#: Seconds from one look for adapters that nobody asks for to the next.
_LOOK_S = 5.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


class AdapterManager:
    """The adapters of one engine. One thread calls everything.

    Args:
        load: brings an adapter to the device; called in threads of its own.
        drop: lets an adapter's device memory go; whether host memory has it still.
        capacity: bytes of device memory for adapters.
        max_adapters: how many may be on the device; None: as many as fit.
        refusal: why this model has no adapters; "" where it may.
        forget: lets what host memory has of an adapter go; None: it keeps none.
        holds: whether host memory has an adapter still: it makes room for later ones.
    """

    def __init__(
        self,
        load: Callable[[AdapterRef], AdapterFacts],
        drop: Callable[[str], bool],
        capacity: int,
        max_adapters: int | None = None,
        refusal: str = "",
        forget: Callable[[str], None] | None = None,
        holds: Callable[[str], bool] | None = None,
    ) -> None:
        self.capacity = capacity
        self._load, self._drop, self._most = load, drop, max_adapters
        self._refusal = refusal
        self._entries: dict[str, AdapterEntry] = {}
        self._waiting: dict[str, deque[Request]] = {}
        #: For loaded adapters, held back while others wait for room.
        self._held: list[Request] = []
        self._departed = HostTierRecords(holds, forget)
        self._looked_at = 0.0
        self._shares = OwnerShares()
        self._threads: ThreadPoolExecutor | None = None
        self._clock = 0
        self._overtaken = 0
        #: What operators want there, and wait for.
        self._asked: dict[str, tuple[AdapterRef, Future[None]]] = {}
        self._pinned: set[str] = set()
        self._num_loads = self._num_evictions = 0
        self._load_seconds = 0.0

    @classmethod
    def of(cls, host: AdapterHost) -> Self:
        """What is on the device of an executor."""
        return cls(
            host.load, host.unload, host.num_bytes, host.max_adapters, host.refusal,
            forget=host.drop_host_copy, holds=host.has_host_copy,
        )  # fmt: skip

    # -- requests -----------------------------------------------------------------------------

    def check(self, ref: AdapterRef) -> None:
        """Raise `InvalidRequest` for an adapter that can never be used here."""
        if self._refusal:
            raise InvalidRequest(self._refusal, param="model")
        if not _DIGEST.fullmatch(ref.digest):
            raise InvalidRequest("An adapter's digest must be 64 hex digits.", param="model")

    def vocab_size(self, digest: str) -> int | None:
        """Of an adapter that brings tokens, 0 of others; None while it isn't on the device."""
        entry = self._entries.get(digest)
        return None if entry is None or entry.loading is not None else entry.vocab_size

    @property
    def has_pending(self) -> bool:
        """Whether `poll_ready` may bring something."""
        loading = any(entry.loading is not None for entry in self._entries.values())
        return bool(self._waiting or self._held or self._asked) or loading

    @property
    def loading_adapters(self) -> Iterator[Request]:
        """Requests whose adapter is being read."""
        for digest, entry in self._entries.items():
            if entry.loading is not None:
                yield from self._waiting.get(digest, ())

    @property
    def num_waiting(self) -> int:
        """Requests whose adapter isn't there yet."""
        return len(self._held) + sum(map(len, self._waiting.values()))

    def admit(self, request: Request) -> bool:
        """Take a request in; False when it must wait for its adapter.

        Raises `InvalidRequest` for an adapter larger than the pool, or than what pinned ones leave.
        """
        ref = request.message.adapter
        if ref is None:
            return True
        self._shares.note(ref.owner)
        entry = self._entries.get(ref.digest)
        loaded = entry is not None and entry.loading is None
        may_go = entry is not None and loaded and self._may_use(entry, ref.owner)
        if entry is not None and may_go and self._may_overtake(ref.owner):
            self._use(entry, request)
            return True
        if entry is None:
            self._check_size(_file_bytes(ref), ref)
        for sequence in request.sequences:
            sequence.status = SequenceStatus.WAITING_FOR_ADMISSION
        if may_go:
            self._held.append(request)
            return False
        self._waiting.setdefault(ref.digest, deque()).append(request)
        self._begin_loads()
        return False

    def _may_overtake(self, owner: str) -> bool:
        """Whether an owner's request for a loaded adapter needn't wait for others' turns."""
        if not self._wants_room(owner):
            self._overtaken = 0
            return True
        self._overtaken += 1
        return self._overtaken <= MAX_OVERTAKING

    def _wants_room(self, owner: str) -> bool:
        """Whether requests wait for room that it's their owner's turn to have before this one."""
        used = self._bytes_by_owner(in_use=True)
        most = used.get(owner, 0)
        return any(used.get(each, 0) <= most for each, _ in self._missing(self._waiting))

    def _missing(self, digests: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Owner and digest of those that aren't even being read, though their owners may have more
        in use.
        """
        may: dict[str, bool] = {}
        for digest in digests:
            if digest not in self._entries:
                owner = self._wanted(digest).owner
                if owner not in may:
                    may[owner] = self._within_share(owner)
                if may[owner]:
                    yield owner, digest

    def _within_share(self, owner: str) -> bool:
        """Whether an owner may have one more in use."""
        own = (e for e in self._entries.values() if e.ref.owner == owner and (e.users or e.loading))
        return self._shares.max_bytes(owner, own, self.capacity, self._most)

    def _may_use(self, entry: AdapterEntry, owner: str) -> bool:
        """Whether an owner's request may use one that is there."""
        return bool(entry.users) or self._within_share(owner)

    def _resume_waiting(self) -> None:
        """Those that were held back stand in line again, once nobody before them waits for room."""
        held, self._held = self._held, []
        waits: dict[str, bool] = {}
        for request in held:
            ref = request.message.adapter
            if ref is not None and ref.owner not in waits:
                waits[ref.owner] = self._wants_room(ref.owner)
            if ref is None or waits[ref.owner]:
                self._held.append(request)
            else:
                self._waiting.setdefault(ref.digest, deque()).append(request)

    def poll_ready(self, timeout_s: float) -> list[tuple[Request, QuireError | None]]:
        """Requests whose adapter is there now, or why it can't be.

        Waits up to `timeout_s` for the first, and a moment for the others.
        """
        loading = [each.loading for each in self._entries.values() if each.loading is not None]
        if loading and timeout_s:
            wait(loading, timeout_s, FIRST_COMPLETED)
            wait(loading, min(timeout_s, BATCHING_WINDOW_S))
        ready: list[tuple[Request, QuireError | None]] = []
        for digest, entry in list(self._entries.items()):
            if (load := entry.loading) is not None and load.done():
                ready += self._loaded(digest, entry, load)
        self._resume_waiting()
        ready += self._admit_waiting()
        ready += self._refuse_for_good()
        self._begin_loads()
        if all(entry.loading is None for entry in self._entries.values()):
            self.close()  # idle readers would stay as long as the process
        return ready

    def _refuse_for_good(self) -> Iterator[tuple[Request, QuireError]]:
        """Requests whose adapter has no room any more, since others were pinned meanwhile."""
        waiting = {*self._asked, *self._waiting} if self._pinned else set()
        for digest in waiting - self._entries.keys():
            ref = self._wanted(digest)
            try:
                self._check_size(_file_bytes(ref), ref)
            except InvalidRequest as refusal:
                self._pinned.discard(digest)
                if (asked := self._asked.pop(digest, None)) is not None:
                    asked[1].set_exception(refusal)
                for request in self._waiting.pop(digest, ()):
                    yield request, refusal

    def _loaded(
        self, digest: str, entry: AdapterEntry, done: Future[AdapterFacts]
    ) -> list[tuple[Request, QuireError | None]]:
        """A load has ended; the requests that learn why it failed."""
        asked = self._asked.pop(digest, None)
        try:
            facts = done.result()
        except Exception as error:  # of one adapter: its requests fail, and nobody else's
            log.warning("The adapter %s can't be loaded: %s", digest[:12], error)
            del self._entries[digest]
            self._pinned.discard(digest)
            refusal = _as_refusal(error)
            if asked is not None:
                asked[1].set_exception(refusal)
            return [(request, refusal) for request in self._waiting.pop(digest, ())]
        entry.loading, entry.rank, entry.num_bytes = None, facts.rank, facts.num_bytes
        entry.vocab_size = facts.vocab_size
        entry.left_at = time.monotonic()
        entry.load_seconds = facts.load_seconds
        self._num_loads += 1
        self._load_seconds += facts.load_seconds
        if asked is not None:
            asked[1].set_result(None)
        self._unload(digest)
        return []

    def _admit_waiting(self) -> Iterator[tuple[Request, QuireError | None]]:
        """Requests that wait for an adapter that is there."""
        for digest in list(self._waiting):
            entry, owner = self._entries.get(digest), self._wanted(digest).owner
            if entry is not None and entry.loading is None and self._may_use(entry, owner):
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
        """A request has left the engine, wherever it stood."""
        ref = request.message.adapter
        if ref is None:
            return
        if (entry := self._entries.get(ref.digest)) is not None:
            entry.users.discard(request.request_id)
            entry.left_at = time.monotonic()
        if request in self._held:
            self._held.remove(request)
        line = self._waiting.get(ref.digest)
        if line is not None and request in line:
            line.remove(request)
            if not line:
                del self._waiting[ref.digest]
        self._unload(ref.digest)
        if self._waiting:
            self._begin_loads()

    # -- room ---------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Of device memory that is taken, or promised."""
        return sum(entry.num_bytes for entry in list(self._entries.values()))

    def _begin_loads(self) -> None:
        """Start to read those that wait, as far as there is room."""
        while (digest := self._next()) is not None:
            ref = self._wanted(digest)
            size = _file_bytes(ref)
            begun = [each.num_bytes for each in self._entries.values() if each.loading is not None]
            if len(begun) >= _READERS and sum(begun) + size > _AHEAD_BYTES:
                return
            if not self._make_room(size, ref.owner):
                return
            self._begin(ref, size)

    def _next(self) -> str | None:
        """Whose turn it is: of the owner that uses least, the one that has waited longest."""
        used = self._bytes_by_owner(in_use=True)
        asked = ((self._wanted(d).owner, d) for d in self._asked if d not in self._entries)
        missing = chain(asked, self._missing(self._waiting))
        first = min(missing, key=lambda each: used.get(each[0], 0), default=None)
        return None if first is None else first[1]

    def _wanted(self, digest: str) -> AdapterRef:
        line = self._waiting.get(digest)
        ref = line[0].message.adapter if line else None
        return ref or self._asked[digest][0]

    def _begin(self, ref: AdapterRef, size: int) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix="adapters")
        self._clock += 1
        entry = AdapterEntry(ref, size, self._threads.submit(self._load, ref), used_at=self._clock)
        entry.pinned = ref.digest in self._pinned
        self._departed.restore(ref.digest)
        self._entries[ref.digest] = entry

    def _make_room(self, size: int, owner: str) -> bool:
        """Drive out what nobody uses until an adapter fits; False when it can't."""
        while self.num_bytes + size > self.capacity or (
            self._most is not None and len(self._entries) >= self._most
        ):
            victim = self._victim(owner)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _victim(self, taker: str) -> str | None:
        """Who goes: the longest unused, of owners over their share where there is one."""
        free = {digest: entry for digest, entry in self._entries.items() if entry.is_free}
        held = self._bytes_by_owner()
        share = self.capacity / max(1, len(held.keys() | {taker}))
        over = {d: e for d, e in free.items() if held[e.ref.owner] > share}
        among = over or free
        return min(among, key=lambda digest: among[digest].used_at, default=None)

    def _evict(self, digest: str) -> None:
        entry = self._entries.pop(digest)
        self._num_evictions += 1
        self._departed.add(entry, in_host=self._drop(digest))

    def _bytes_by_owner(self, *, in_use: bool = False) -> dict[str, int]:
        held: dict[str, int] = {}
        for entry in self._entries.values():
            if not (in_use and entry.is_free):
                held[entry.ref.owner] = held.get(entry.ref.owner, 0) + entry.num_bytes
        return held

    def _check_size(self, size: int, ref: AdapterRef) -> None:
        if size > self.capacity:
            raise InvalidRequest(
                f"The adapter {ref.name!r} needs {size} bytes, but this replica holds "
                f"{self.capacity} bytes of adapters.",
                param="model",
            )
        pinned = [each for each in self._entries.values() if each.pinned]
        left = self.capacity - sum(each.num_bytes for each in pinned)
        if size > left or (self._most is not None and len(pinned) >= self._most):
            raise InvalidRequest(
                f"There is no room for the adapter {ref.name!r}: others are pinned.", param="model"
            )

    # -- for operators ------------------------------------------------------------------------

    def preload(self, ref: AdapterRef, *, pin: bool) -> Future[None]:
        """Bring an adapter to the device without a request; `pin`: and keep it there.

        What is returned is done once it's there, or holds why it can't be. Raises `InvalidRequest`
        for one that can never be used here.
        """
        self.check(ref)
        if ref.digest not in self._entries:
            self._check_size(_file_bytes(ref), ref)
        (self._pinned.add if pin else self._pinned.discard)(ref.digest)
        entry = self._entries.get(ref.digest)
        if entry is not None:
            entry.pinned, entry.unloading = pin, False
        _, done = self._asked.setdefault(ref.digest, (ref, Future()))
        if entry is not None and entry.loading is None:
            del self._asked[ref.digest]
            done.set_result(None)
        self._begin_loads()
        return done

    def unload(self, digest: str) -> bool:
        """Have an adapter leave the device as soon as nobody uses it or waits for it, unless it's
        asked for by `preload` before; False where it isn't there.
        """
        self._pinned.discard(digest)
        if (asked := self._asked.pop(digest, None)) is not None:
            asked[1].set_exception(InvalidRequest("The adapter was unloaded.", param="model"))
        entry = self._entries.get(digest)
        if entry is None:
            return False
        entry.pinned, entry.unloading = False, True
        self._unload(digest)
        return True

    def _unload(self, digest: str) -> None:
        """Have an adapter that is to be unloaded leave, once nobody needs it."""
        entry = self._entries.get(digest)
        if entry is None or not (entry.unloading and entry.is_free) or digest in self._waiting:
            return
        if not any(_digest_of(request) == digest for request in self._held):
            self._evict(digest)

    def drop_idle(self) -> None:
        """Let all go that nobody uses."""
        for digest in [digest for digest, entry in self._entries.items() if entry.is_free]:
            self._evict(digest)

    def evict_idle(self, now: float) -> None:
        """Let those go, from host memory too, that no request has used for long.

        `now`: monotonic seconds. Cheap enough to be called between any two steps.
        """
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        self._shares.forget(now)
        for digest, entry in list(self._entries.items()):
            if entry.is_free and now - entry.left_at >= IDLE_S:
                self._evict(digest)
        self._departed.give_back_idle(now)

    def states(self) -> list[AdapterStatus]:
        """All that are known, wherever they lie."""
        here = [
            AdapterStatus(
                digest=digest,
                name=entry.ref.name,
                rank=entry.rank,
                tier="disk" if entry.loading is not None else "device",
                num_bytes=entry.num_bytes,
                pinned=entry.pinned,
                num_running=len(entry.users),
                num_waiting=len(self._waiting.get(digest, ())),
                load_seconds=entry.load_seconds,
            )
            for digest, entry in list(self._entries.items())
        ]
        return here + self._departed.states(self._entries)

    def fill_stats(self, stats: EngineStats) -> None:
        """Bring the figures of adapters up to date."""
        stats.adapter_bytes, stats.adapter_capacity_bytes = self.num_bytes, self.capacity
        stats.adapter_slots = self._most or 0
        stats.adapter_loads_total = self._num_loads
        stats.adapter_load_seconds_total = self._load_seconds
        stats.adapter_evictions_total = self._num_evictions

    def close(self) -> None:
        """End the threads that read."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None


def _digest_of(request: Request) -> str:
    return digest_of(request.message.adapter)


def _file_bytes(ref: AdapterRef) -> int:
    """What an adapter will take, by its file; 0 where that isn't there: loading it will say so."""
    path = Path(ref.path)
    try:
        return (path if path.is_file() else path / WEIGHTS_FILE).stat().st_size
    except OSError:
        return 0


def _as_refusal(error: BaseException | None) -> QuireError:
    """What a request learns of a load that failed."""
    if isinstance(error, QuireError):
        return error
    return InvalidRequest(f"The adapter can't be loaded: {error!r}.", param="model")
