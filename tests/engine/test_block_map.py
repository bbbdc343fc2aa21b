"""What a replica tells of its blocks while somebody watches, against the pool itself."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import redis

from engine.contract.messages import MediaItem
from engine.contract.replica_state import (
    WATCH_TTL_S,
    KVMapFrame,
    decode_frame,
    frames_key,
    watch_key,
)
from engine.scheduler.request import SequenceStatus
from engine.serving.kv_map import KVMapBuilder, KVMapPublisher
from kv_map.state import cells_of
from tests.engine.helpers import Driver
from tests.engine.kv_transfer.test_offloading import connector_of, make, message, prompt, run
from tests.engine.replica import Gateway, replica
from tests.engine.test_service import Folder
from tests.survey.recipes import RECIPES
from tests.survey.tiny import make_checkpoint


@dataclass
class Mirror:
    """What a watcher knows."""

    blocks: dict[int, tuple[int, bool, str, frozenset[str]]] = field(default_factory=dict)
    evicted: int = 0

    def apply(self, frame: KVMapFrame) -> None:
        if frame.whole:
            self.blocks.clear()
        self.evicted += frame.evicted
        for state in frame.blocks:
            users = frozenset(frame.words[user] for user in state.users)
            owner = frame.words[state.owner]
            self.blocks[state.block_id] = (state.refs, state.cached, owner, users)


def make_map() -> KVMapBuilder:
    return KVMapBuilder(KVMapPublisher(redis.Redis(), "none", "r1"), "r1", "r1-1")


def test_a_tenants_states_and_their_kept_copies_are_counted(tmp_path: Path) -> None:
    make_checkpoint(RECIPES["mamba2"], tmp_path)
    core, kv_map = make(tmp_path), make_map()
    kv_map.watch(b"1")
    run(core, {"a": prompt(1, 70)}, tenant="one")
    core.add_request(message("b", prompt(2, 70), tenant="two"))
    core.step()
    one, two = (
        next(tenant for tenant in kv_map.frame(core.scheduler).tenants if tenant.name == name)
        for name in ("one", "two")
    )
    assert (one.states, two.states) == (0, 2)
    assert one.retained_states == 2


def truth(driver: Driver) -> dict[int, tuple[int, bool, str, frozenset[str]]]:
    """The same, read from the pool and the block tables."""
    users: dict[int, set[str]] = {}
    for sequence in driver.scheduler.running:
        for block in driver.blocks(sequence):
            users.setdefault(block.block_id, set()).add(sequence.request.request_id)
    pool = driver.scheduler.kv.pool
    return {
        block.block_id: (
            block.ref_count,
            block.block_hash is not None,
            block.charged_to.name if block.charged_to else "",
            frozenset(users.get(block.block_id, ())),
        )
        for block in pool.blocks
        if block.charged_to is not pool.quotas.unowned
    }


def test_a_block_says_in_which_tier_it_is(model_folder: Folder) -> None:
    core, kv_map = make(model_folder("llama"), kv_offloading_size=0.01), make_map()
    kv_map.watch(b"1")
    run(core, {"a": prompt(1, 70)})
    frame = kv_map.frame(core.scheduler)
    cells = cells_of(frame, frame.blocks).values()
    assert sorted(cell.tier for cell in cells if cell.cached) == 4 * ["host"]
    assert {cell.tier for cell in cells if not cell.cached} == {""}
    connector_of(core).host.clear()
    kv_map.watch(b"2")
    frame = kv_map.frame(core.scheduler)
    assert frame.num_cached == 4
    assert {cell.tier for cell in cells_of(frame, frame.blocks).values()} == {""}
    core.shutdown()


def test_frames_add_up_to_the_pool_whatever_happens() -> None:
    kv_map, rng = make_map(), random.Random(5)
    driver, mirror = Driver(num_blocks=40, token_budget=30), Mirror()
    alive = []
    prompts = [[rng.randrange(9) for _ in range(rng.randrange(4, 30))] for _ in range(6)]
    kv_map.watch(b"1")
    for turn in range(120):
        if turn == 60:
            kv_map.watch(b"2")  # somebody else comes
        if rng.random() < 0.4:
            tenant = rng.choice("ab")
            alive.append(
                driver.add(rng.choice(prompts), tenant=tenant, namespace=tenant, max_tokens=20)
            )
        if driver.scheduler.has_work:
            driver.step()
        if alive and rng.random() < 0.3:
            driver.scheduler.finish(alive.pop(rng.randrange(len(alive))), "abort")
        frame = kv_map.frame(driver.scheduler)
        assert frame.whole == (turn in (0, 60))
        assert frame.number == turn + 1 - 60 * (turn >= 60)
        mirror.apply(frame)
        for tenant in frame.tenants:
            used = [b for b in mirror.blocks.values() if b[0] and b[2] == tenant.name]
            assert len(used) == tenant.used
        assert mirror.blocks == truth(driver)
    assert mirror.evicted > 0
    assert any(state[0] > 1 for state in mirror.blocks.values()) or driver.scheduler.running


def test_a_shared_block_names_all_who_use_it() -> None:
    kv_map, driver = make_map(), Driver(num_blocks=20)
    kv_map.watch(b"1")
    kv_map.frame(driver.scheduler)
    first = driver.add(list(range(9)))
    driver.step()
    driver.add(list(range(9)))
    driver.step()
    frame = kv_map.frame(driver.scheduler)
    shared = {s.block_id: s for s in frame.blocks}[driver.table(first)[0]]
    assert shared.refs == 2
    assert sorted(frame.words[user] for user in shared.users) == ["r0", "r1"]
    assert frame.words[shared.owner] == "default"


def test_blocks_name_the_picture_among_their_tokens_while_they_are_cached() -> None:
    kv_map, driver = make_map(), Driver(num_blocks=20)
    kv_map.watch(b"1")
    sequence = driver.add(list(range(14)))
    sequence.request.message.media = [MediaItem("image", bytes([7]) * 32, ((5, 4),))]
    driver.step()
    blocks = driver.table(sequence)
    for finished in (False, True):
        if finished:
            driver.scheduler.finish(sequence, "abort")
        frame = kv_map.frame(driver.scheduler)
        media = {state.block_id: frame.words[state.media or 0] for state in frame.blocks}
        assert [media[block_id] for block_id in blocks[:3]] == [
            "", "image 070707070707", "image 070707070707",
        ]  # fmt: skip


def test_a_block_forgets_its_picture_with_the_tokens_that_held_it() -> None:
    kv_map, driver = make_map(), Driver(num_blocks=8)
    kv_map.watch(b"1")
    sequence = driver.add(list(range(14)), tenant="first")
    sequence.request.message.media = [MediaItem("image", bytes([7]) * 32, ((0, 14),))]
    driver.step()
    kv_map.frame(driver.scheduler)
    driver.scheduler.finish(sequence, "abort")
    # Begins and ends between two frames, in all blocks.
    second = driver.add(list(range(100, 126)), tenant="second")
    driver.step()
    driver.scheduler.finish(second, "abort")
    frame = kv_map.frame(driver.scheduler)
    blocks = [state for state in frame.blocks if frame.words[state.owner] == "second"]
    assert len(blocks) == 7
    assert {frame.words[state.media or 0] for state in blocks} == {""}


def test_a_pool_that_nobody_watches_notes_nothing() -> None:
    kv_map, driver = make_map(), Driver(num_blocks=20)
    driver.add(list(range(9)))
    driver.step()
    kv_map.publish_if_due(driver.scheduler)
    assert driver.scheduler.kv.pool.changed_block_ids is None
    kv_map.watch(b"1")
    kv_map.frame(driver.scheduler)
    assert driver.scheduler.kv.pool.changed_block_ids is not None
    kv_map.watch(b"")
    kv_map.publish_if_due(driver.scheduler)
    assert driver.scheduler.kv.pool.changed_block_ids is None


def test_a_flight_says_what_was_ahead_and_never_names_another_tenants_request() -> None:
    driver = Driver(num_blocks=100, token_budget=8)
    first = driver.add(list(range(20)), tenant="a")
    driver.step()
    other = driver.add(list(range(40, 60)), tenant="b")
    last = driver.add(list(range(60, 80)), tenant="a")
    assert (first.timeline.num_ahead, first.timeline.behind) == (0, [])
    assert (other.timeline.num_ahead, other.timeline.num_ahead_own, other.timeline.behind) == (
        1,
        0,
        [],
    )
    assert (last.timeline.num_ahead, last.timeline.num_ahead_own) == (2, 1)
    assert last.timeline.behind == ["r0"]
    while first.num_output_tokens == 0:
        driver.step()
    assert [tokens for _, tokens in first.timeline.chunks] == [8, 8, 4]
    assert first.timeline.prefill_chunks == 3


def test_preemptions_are_told_with_their_moments() -> None:
    driver = Driver(num_blocks=6)
    driver.add(list(range(8)))
    young = driver.add(list(range(20, 28)))
    for _ in range(30):
        driver.step()
        if young.status is SequenceStatus.PREEMPTED:
            break
    assert len(young.timeline.preempted_at) == young.timeline.num_preemptions == 1


def test_a_replica_publishes_while_it_is_watched(redis_url: str, model_folder: Folder) -> None:
    prefix = f"map{time.time_ns()}"
    with replica(redis_url, prefix, model_folder("llama")):
        gateway = Gateway(redis_url, prefix)
        gateway.await_state("ready")
        channel = gateway.redis.pubsub(ignore_subscribe_messages=True)
        channel.subscribe(frames_key("r1", prefix))
        gateway.request("before", [5] * 40)
        gateway.finish("before")
        assert channel.get_message(timeout=1.0) is None
        gateway.redis.incr(watch_key("r1", prefix))
        gateway.redis.expire(watch_key("r1", prefix), WATCH_TTL_S)
        mirror, frames = Mirror(), []
        deadline = time.monotonic() + 60
        seen: set[str] = set()
        names: list[str] = []
        while not seen and time.monotonic() < deadline:
            gateway.redis.expire(watch_key("r1", prefix), WATCH_TTL_S)
            if all(gateway.is_finished(name) for name in names):
                # One alone can be over between two frames, again and again.
                names += [f"seen{len(names) + number}" for number in range(20)]
                for name in names[-20:]:
                    gateway.request(name, [7] * 60, max_tokens=150)
            gateway.read(block_ms=10)
            message = channel.get_message(timeout=0.1)
            if message is not None:
                frames.append(decode_frame(message["data"]))
                mirror.apply(frames[-1])
                seen = {user for state in mirror.blocks.values() for user in state[3]}
        gateway.finish(*names)
        assert frames[0].whole
        assert not any(frame.whole for frame in frames[1:])
        assert seen
        assert seen <= set(names)
        assert frames[0].num_blocks == frames[-1].num_blocks > 0
