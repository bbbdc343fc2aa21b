"""Who is on the device, who waits, who goes: without a model."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from engine.contract.errors import InvalidRequest
from engine.contract.lora import WEIGHTS_FILE, AdapterRef
from engine.contract.messages import EngineRequest
from engine.lora.adapter_cache import AdapterManager
from engine.lora.store import AdapterFacts
from engine.scheduler.request import Request

_PATIENCE_S = 60.0


class Disk:
    """An `AdapterHost`: adapters of so many bytes, loads that can be held up, and what is on the
    device and in host memory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.device = folder, set[str]()
        self.bad: set[str] = set()
        self.stored: list[str] = []
        #: How many of those that left host memory keeps.
        self.max_stored = 1000
        self.num_bytes, self.refusal = 0, ""
        self.max_adapters: int | None = None
        self.open = threading.Event()
        self.open.set()

    def manager(
        self, num_bytes: int, max_adapters: int | None = None, refusal: str = ""
    ) -> AdapterManager:
        """A manager of this device, which has so many bytes for adapters."""
        self.num_bytes, self.max_adapters, self.refusal = num_bytes, max_adapters, refusal
        return AdapterManager(self)

    def ref(self, number: int, owner: str = "", size: int = 100) -> AdapterRef:
        digest = f"{number:064x}"
        path = self.folder / digest
        path.mkdir(exist_ok=True)
        (path / WEIGHTS_FILE).write_bytes(bytes(size))
        return AdapterRef(digest=digest, name=f"n{number}", path=str(path), owner=owner)

    def load(self, ref: AdapterRef) -> AdapterFacts:
        assert self.open.wait(_PATIENCE_S)
        if ref.digest in self.bad:
            raise InvalidRequest("It is spoilt.", param="path")
        self.device.add(ref.digest)
        size = (Path(ref.path) / WEIGHTS_FILE).stat().st_size
        return AdapterFacts(rank=8, num_bytes=size, load_seconds=0.5)

    def unload(self, digest: str) -> None:
        self.device.discard(digest)
        self.stored.append(digest)
        del self.stored[: -self.max_stored]

    def has_host_copy(self, digest: str) -> bool:
        return digest in self.stored

    def drop_host_copy(self, digest: str) -> None:
        if digest in self.stored:
            self.stored.remove(digest)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def request(ref: AdapterRef | None, name: str) -> Request:
    message = EngineRequest(request_id=name, gateway_id="", prompt_token_ids=[1], adapter=ref)
    return Request(message)


def settle(pool: AdapterManager) -> list[Request]:
    """All that can go on, once no load is under way."""
    ready = []
    while True:
        loaded = [ref for ref, error in pool.poll_ready(_PATIENCE_S) if error is None]
        ready += loaded
        if not loaded and not any(state.tier == "disk" for state in pool.states()):
            return ready


def test_a_request_waits_for_its_adapter_and_the_next_one_does_not(disk: Disk) -> None:
    pool = disk.manager(1000)
    first, second = request(disk.ref(1), "a"), request(disk.ref(1), "b")
    assert pool.admit(request(None, "base"))
    assert not pool.admit(first)
    assert pool.num_waiting == 1
    assert settle(pool) == [first]
    assert pool.admit(second)
    (state,) = pool.states()
    assert (state.tier, state.num_running, state.rank, state.num_bytes) == ("device", 2, 8, 100)
    pool.close()


def test_the_longest_unused_goes_first_and_nobody_in_use_or_pinned(disk: Disk) -> None:
    pool = disk.manager(300)
    used, old, recent = (request(disk.ref(number), str(number)) for number in (1, 2, 3))
    for ref in (used, old, recent):
        pool.admit(ref)
        settle(pool)
    pool.release(old)
    pool.release(recent)
    pool.admit(request(disk.ref(4), "4"))
    settle(pool)
    assert disk.device == {disk.ref(number).digest for number in (1, 3, 4)}
    done = pool.preload(disk.ref(3), pin=True)
    assert done.done()
    waiting = request(disk.ref(5), "5")
    assert not pool.admit(waiting)
    assert settle(pool) == []  # 1 and 4 are in use, 3 is pinned
    pool.unload(disk.ref(3).digest)
    assert settle(pool) == [waiting]
    tiers = {state.name: state.tier for state in pool.states()}
    assert tiers == {"n1": "device", "n4": "device", "n5": "device", "n2": "host", "n3": "host"}
    pool.close()


def test_an_unloaded_adapter_leaves_with_its_last_user(disk: Disk) -> None:
    pool = disk.manager(1000)
    one, two, late = (request(disk.ref(1), name) for name in ("a", "b", "c"))
    pool.admit(one)
    pool.admit(two)
    assert pool.unload(disk.ref(1).digest)  # while it's being read
    assert settle(pool) == [one, two]
    assert pool.admit(late)
    for user in (one, two):
        pool.release(user)
        assert disk.ref(1).digest in disk.device
    pool.release(late)
    assert not disk.device
    assert not pool.unload(disk.ref(1).digest)
    pool.admit(one)
    assert settle(pool) == [one]  # it's read again
    pool.unload(disk.ref(1).digest)
    pool.preload(disk.ref(1), pin=False)  # and this is asked for later
    pool.release(one)
    assert disk.device == {disk.ref(1).digest}
    pool.close()


def test_an_unloaded_adapter_that_nobody_waits_for_leaves_once_it_was_read(disk: Disk) -> None:
    pool = disk.manager(1000)
    gone = request(disk.ref(1), "a")
    pool.admit(gone)
    pool.release(gone)
    pool.unload(disk.ref(1).digest)
    settle(pool)
    assert not disk.device
    assert [state.tier for state in pool.states()] != ["device"]
    pool.close()


def test_what_host_memory_has_no_room_for_is_told_to_lie_on_disk(disk: Disk) -> None:
    disk.max_stored = 2
    pool = disk.manager(1000, 1)
    for number in range(1, 5):
        response = request(disk.ref(number), str(number))
        pool.admit(response)
        assert pool.poll_ready(_PATIENCE_S) == [(response, None)]
        pool.release(response)
    tiers = {state.name: state.tier for state in pool.states()}
    assert tiers == {"n4": "device", "n3": "host", "n2": "host", "n1": "disk"}
    pool.close()


def test_owners_over_their_share_give_first(disk: Disk) -> None:
    pool = disk.manager(400)
    small = request(disk.ref(1, "small"), "s")
    pool.admit(small)
    settle(pool)
    for number in (2, 3, 4):
        response = request(disk.ref(number, "large"), str(number))
        pool.admit(response)
        settle(pool)
        pool.release(response)
    pool.release(small)
    pool.admit(request(disk.ref(5, "large"), "5"))
    settle(pool)
    assert disk.ref(1).digest in disk.device  # used longest ago, but within its owner's share
    pool.close()


def test_the_owner_that_uses_least_comes_first(disk: Disk) -> None:
    pool = disk.manager(200)
    running, stays = request(disk.ref(1, "many"), "r"), request(disk.ref(4, "many"), "s")
    for ref in (running, stays):
        pool.admit(ref)
        settle(pool)
    pool.admit(request(disk.ref(2, "many"), "m"))
    few = request(disk.ref(3, "few"), "f")
    pool.admit(few)
    pool.release(running)
    assert settle(pool) == [few]
    pool.close()


def test_only_so_many_pass_one_that_waits_for_room(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.lora.adapter_cache.MAX_OVERTAKING", 3)
    pool = disk.manager(100)
    hot = disk.ref(1)
    first = request(hot, "first")
    pool.admit(first)
    settle(pool)
    other = request(disk.ref(2), "other")
    assert not pool.admit(other)
    passing = [request(hot, str(number)) for number in range(5)]
    admitted = [ref for ref in passing if pool.admit(ref)]
    assert len(admitted) == 3
    assert pool.poll_ready(0.0) == []  # the others are held back, not merely late
    assert pool.num_waiting == 3
    for item in (first, *admitted):
        pool.release(item)
    assert settle(pool) == [other]
    pool.release(other)
    assert settle(pool) == passing[3:]
    pool.close()


def test_small_ones_are_begun_ahead_and_of_large_ones_two_at_once(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.lora.adapter_cache._AHEAD_BYTES", 500)
    for size, started in ((100, 5), (300, 2), (900, 2)):
        pool = disk.manager(10_000)
        disk.open.clear()
        waiting = [request(disk.ref(number, size=size), str(number)) for number in range(8)]
        for ref in waiting:
            assert not pool.admit(ref)
        assert pool.num_bytes == started * size
        disk.open.set()
        assert len(settle(pool)) == 8
        pool.close()


def test_those_that_are_read_together_go_on_together_where_nothing_runs(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.lora.adapter_cache.BATCHING_WINDOW_S", _PATIENCE_S)
    pool = disk.manager(1000)
    for number in (1, 2, 3):
        pool.admit(request(disk.ref(number), str(number)))
    ready = pool.poll_ready(_PATIENCE_S)
    assert [request.request_id for request, _ in ready] == ["1", "2", "3"]
    pool.close()


def test_a_load_that_fails_fails_its_own_requests(disk: Disk) -> None:
    pool = disk.manager(1000)
    disk.bad.add(disk.ref(1).digest)
    bad, good = request(disk.ref(1), "bad"), request(disk.ref(2), "good")
    pool.admit(bad)
    pool.admit(good)
    errors = {}
    while pool.has_pending:
        errors |= {request.request_id: error for request, error in pool.poll_ready(_PATIENCE_S)}
    assert errors["good"] is None
    assert isinstance(errors["bad"], InvalidRequest)
    disk.bad.clear()
    again = request(disk.ref(1), "again")
    pool.admit(again)
    assert settle(pool) == [again]
    pool.close()


def test_a_request_that_leaves_while_it_waits_is_forgotten(disk: Disk) -> None:
    pool = disk.manager(1000)
    disk.open.clear()
    gone = request(disk.ref(1), "gone")
    pool.admit(gone)
    pool.release(gone)
    assert pool.num_waiting == 0
    disk.open.set()
    assert settle(pool) == []
    assert pool.states()[0].num_running == 0
    pool.close()


def test_what_can_never_be_used_is_refused_at_once(disk: Disk) -> None:
    pool = disk.manager(100)
    with pytest.raises(InvalidRequest, match="needs 101 bytes, but this replica holds 100"):
        pool.admit(request(disk.ref(1, size=101), "large"))
    for digest in ("../x", "", "a" * 63, "G" * 64):
        with pytest.raises(InvalidRequest, match="64 hex digits"):
            pool.check(AdapterRef(digest=digest, name="../x"))
    off = disk.manager(100, refusal="There are none here.")
    with pytest.raises(InvalidRequest, match="There are none here"):
        off.check(disk.ref(1))
    pool.close()


def test_what_nobody_asks_for_gives_its_memory_back(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the device and from host memory; not what is in use, pinned, or was used just now."""
    pool = disk.manager(400)
    idle, driven_out, used, last = (request(disk.ref(number), str(number)) for number in range(4))
    for ref in (driven_out, idle, used, last):
        pool.admit(ref)
        settle(pool)
    for ref in (driven_out, idle):
        pool.release(ref)
    pool.preload(disk.ref(4), pin=True)
    settle(pool)
    gone = driven_out.message.adapter
    assert gone is not None
    assert disk.stored == [gone.digest]
    start = time.monotonic()
    pool.evict_idle(start + 300)
    assert disk.device == {disk.ref(number).digest for number in (0, 2, 3, 4)}
    with monkeypatch.context() as later:
        later.setattr(time, "monotonic", lambda: start + 600)
        pool.release(last)
    pool.evict_idle(start + 900)
    assert disk.device == {disk.ref(number).digest for number in (2, 3, 4)}
    assert not disk.stored
    tiers = {state.name: state.tier for state in pool.states()}
    assert tiers == {"n0": "disk", "n1": "disk", "n2": "device", "n3": "device", "n4": "device"}
    assert not pool.admit(idle)
    assert pool.poll_ready(_PATIENCE_S) == [(idle, None)]
    pool.close()


def test_who_waits_for_room_that_is_pinned_meanwhile_is_refused(disk: Disk) -> None:
    pool = disk.manager(100)
    first, second = request(disk.ref(1), "a"), request(disk.ref(2), "b")
    assert not pool.admit(first)
    assert settle(pool) == [first]
    assert not pool.admit(second)
    asked = [pool.preload(disk.ref(number), pin=False) for number in (2, 3)]
    pool.preload(disk.ref(1), pin=True)
    ((refused, why),) = pool.poll_ready(0.0)
    assert (refused, isinstance(why, InvalidRequest)) == (second, True)
    assert all(isinstance(future.exception(), InvalidRequest) for future in asked)
    assert not pool.has_pending
    pool.close()


def running(pool: AdapterManager, *refs: AdapterRef) -> list[Request]:
    """Requests for these, one each; those that may go on do."""
    requests = [request(ref, ref.name) for ref in refs]
    admitted = [request for request in requests if pool.admit(request)]
    return admitted + settle(pool)


def test_a_flood_of_one_owners_leaves_a_place_to_the_others(disk: Disk) -> None:
    pool = disk.manager(10_000, max_adapters=4)
    flood = [disk.ref(number, "many") for number in range(1, 11)]
    isolated = running(pool, *flood[:4])
    assert len(isolated) == 4, "nobody else asks"
    few = request(disk.ref(20, "few"), "few")
    assert not pool.admit(few)
    waiting = running(pool, *flood[4:])
    assert waiting == []
    pool.release(isolated[0])
    assert settle(pool) == [few], "the first place that comes free is the other owner's"
    pool.release(few)
    assert settle(pool) == [], "and stays free for it: three are in use"
    assert disk.ref(20).digest in disk.device
    again = request(disk.ref(20, "few"), "again")
    assert pool.admit(again), "however many wait"
    for ref in isolated[1:]:
        pool.release(ref)
    assert len(settle(pool)) == 3
    pool.close()


def test_a_flood_of_large_ones_leaves_bytes_to_the_others(disk: Disk) -> None:
    pool = disk.manager(400)
    first = running(pool, disk.ref(1, "few"))
    running_refs = running(pool, *(disk.ref(number, "many") for number in range(2, 9)))
    assert len(running_refs) == 3
    pool.release(first[0])
    assert settle(pool) == []
    full = running(pool, disk.ref(9, "few", size=100))
    assert [request.request_id for request in full] == ["n9"]
    pool.close()


def test_one_that_is_there_but_over_its_owners_share_waits(disk: Disk) -> None:
    pool = disk.manager(10_000, max_adapters=4)
    few = running(pool, disk.ref(1, "few"))
    refs = [disk.ref(number, "many") for number in (2, 3, 4)]
    some = running(pool, *refs[:2])
    pool.release(few[0])
    third = running(pool, refs[2])
    assert len(third) == 1
    pool.release(some[0])
    again, other = request(refs[0], "again"), request(refs[1], "other")
    assert pool.admit(again)
    assert pool.admit(other), "that one is in use already"
    late = request(disk.ref(1, "many"), "late")
    assert not pool.admit(late)
    pool.release(again)
    assert settle(pool) == [late]
    pool.close()


def test_a_share_is_whole_again_once_nobody_else_has_asked_for_long(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = disk.manager(10_000, max_adapters=2)
    pool.release(running(pool, disk.ref(1, "few"))[0])
    refs = [disk.ref(number, "many") for number in (2, 3)]
    assert len(running(pool, *refs)) == 1
    monkeypatch.setattr("engine.lora.adapter_cache.IDLE_S", 0.0)
    assert len(settle(pool)) == 1
    pool.close()
