"""Which replica gets a request."""

from __future__ import annotations

import random
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.contract import messages as protocol
from engine.contract.engine_config import EngineConfig
from engine.contract.message_version import MESSAGE_VERSION
from engine.contract.messages import EngineRequest, EngineStats, Heartbeat, ModelInfo
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from inference.engine_client.fleet import Fleet, Replica, choose_replica, prefix_key
from inference.engine_client.queue_limit import Load
from tests.engine.models import make_model


def replica(
    name: str,
    *,
    running: int = 0,
    state: str = "ready",
    stalled: float = 0.0,
    cached_prefixes: frozenset[bytes] = frozenset(),
) -> Replica:
    info = ModelInfo(name="m", path="", max_model_len=10, vocab_size=10, dtype="float32")
    beat = Heartbeat(
        replica_id=name,
        incarnation=name,
        state=state,
        model=info,
        at=1000.0,
        progress_at=1000.0 - stalled,
        stats=EngineStats(num_requests_running=running),
        cached_prefixes=cached_prefixes,
    )
    return Replica(beat, 0.0)


def chosen(replicas: list[Replica], key: bytes, slack: int = 8) -> str:
    replica = choose_replica(replicas, key, slack)
    assert replica is not None
    return replica.heartbeat.replica_id


def test_prompts_with_the_same_beginning_go_to_the_same_replica() -> None:
    replicas = [replica(f"r{i}") for i in range(5)]
    system = list(range(100))
    homes = {chosen(replicas, prefix_key([*system, i], "tenant")) for i in range(50)}
    assert len(homes) == 1


def test_prefixes_spread_and_namespaces_keep_apart() -> None:
    replicas = [replica(f"r{i}") for i in range(4)]
    homes = Counter(chosen(replicas, prefix_key([i] * 64, "tenant")) for i in range(400))
    assert len(homes) == 4
    assert min(homes.values()) > 50
    assert prefix_key([1, 2], "a") != prefix_key([1, 2], "b")


def test_when_a_replica_leaves_only_its_own_prefixes_move() -> None:
    replicas = [replica(f"r{i}") for i in range(4)]
    keys = [prefix_key([i], "t") for i in range(200)]
    initial = {key: chosen(replicas, key) for key in keys}
    remaining = [r for r in replicas if r.heartbeat.replica_id != "r2"]
    assert all(chosen(remaining, key) == home for key, home in initial.items() if home != "r2")


def test_a_busy_home_gives_way_to_an_idler_replica() -> None:
    key = prefix_key([1], "t")
    replicas = [replica("a"), replica("b")]
    home = chosen(replicas, key)
    other = "b" if home == "a" else "a"
    busy = [replica(home, running=9), replica(other)]
    assert chosen(busy, key) == other
    assert chosen([replica(home, running=8), replica(other)], key) == home


@pytest.mark.parametrize("family", ["llama", "qwen2-window"])
def test_a_replica_that_has_a_prefix_in_its_own_memory_gets_it_while_it_isnt_busier(
    family: str, tmp_path: Path
) -> None:
    folder = make_model(family, tmp_path)
    token_ids = list(range(3, 73))
    key = prefix_key(token_ids, "")
    settings = {"num_gpu_blocks_override": 16, "max_model_len": 128, "kv_offloading_size": 0.01}
    core = EngineCore(EngineConfig(model=str(folder), **settings))
    home = chosen([replica("a"), replica("b")], key)
    holder = "b" if home == "a" else "a"

    def chosen_now(running: int = 0) -> str:
        prefixes = core.cached_prefixes.keys()
        return chosen(
            [replica(home), replica(holder, running=running, cached_prefixes=prefixes)], key
        )

    request = EngineRequest(
        request_id="r",
        gateway_id="",
        prompt_token_ids=token_ids,
        prefix_key=key,
        sampling=SamplingParams(temperature=0, max_tokens=2),
    )
    core.add_request(request)
    while core.has_work:
        core.step()
    assert chosen_now() == holder
    # Its KV cache has lost the prompt, its host memory not.
    assert core.scheduler.kv.reset_prefix_cache()
    assert chosen_now() == holder
    assert chosen_now(running=9) == home
    assert core.reset_prefix_cache()
    assert chosen_now() == home


def test_what_was_just_given_counts_as_load() -> None:
    key = prefix_key([1], "t")
    replicas = [replica("a"), replica("b")]
    homes = Counter()
    for _ in range(40):
        actual_replica = choose_replica(replicas, key, 8)
        assert actual_replica is not None
        actual_replica.submitted += 1
        homes[actual_replica.heartbeat.replica_id] += 1
    assert abs(homes["a"] - homes["b"]) <= 9


def test_only_ready_replicas_that_make_progress_are_chosen() -> None:
    sick = [
        replica("loading", state="loading"),
        replica("draining", state="draining"),
        replica("failed", state="failed"),
        replica("stalled", stalled=protocol.STALL_TIMEOUT_S + 1),
    ]
    assert choose_replica(sick, b"k", 8) is None
    assert chosen([*sick, replica("well", running=1000)], b"k") == "well"


class _NoRedis:
    """A fleet that is only told things asks nobody."""


def beat(replica_id: str, timestamp: float, incarnation: str = "1") -> bytes:
    info = ModelInfo(name="m", path="", max_model_len=10, vocab_size=10, dtype="float32")
    return protocol.encode(
        Heartbeat(
            replica_id=replica_id,
            incarnation=incarnation,
            state="ready",
            model=info,
            at=timestamp,
            progress_at=timestamp,
        )
    )


def test_a_fleet_follows_heartbeats() -> None:
    now = time.monotonic()
    fleet = Fleet(_NoRedis(), "p")  # type: ignore[arg-type]
    fleet.update({"a": beat("a", 1.0), "b": None, "c": b"nonsense"}, now)
    assert [r.heartbeat.replica_id for r in fleet] == ["a"]
    assert fleet.model_names() == ["m"]
    first = fleet.get("a")
    assert first is not None
    first.submitted = 3
    fleet.update({"a": beat("a", 1.0)}, now)
    assert fleet.get("a") is first, "the same heartbeat is no news"
    fleet.update({"a": beat("a", 2.0)}, now)
    new = fleet.get("a")
    assert new is not None
    assert new.submitted == 0
    new.count_open(3)  # the engine hadn't read them when it sent the heartbeat
    assert (new.load, Load.of([new]).waiting) == (3, 0)
    fleet.forget("a")
    assert fleet.get("a") is None
    assert fleet.model("m") is not None, "a model is remembered when its replica has gone"


def test_a_replica_whose_messages_are_too_far_away_gets_no_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def encoded(replica_id: str, version: int) -> bytes:
        heartbeat = protocol.decode_heartbeat(beat(replica_id, 1.0))
        heartbeat.message_version = version
        return protocol.encode(heartbeat)

    fleet = Fleet(_NoRedis(), "p")  # type: ignore[arg-type]
    near, far = MESSAGE_VERSION + 1, MESSAGE_VERSION + 2
    values: dict[str, bytes | None] = {"a": encoded("a", near), "b": encoded("b", far)}
    fleet.update(values, time.monotonic())
    assert [replica.heartbeat.replica_id for replica in fleet] == ["a"]
    assert f"Replica b gets no requests: its messages have version {far}" in caplog.text


def test_a_heartbeat_that_stands_still_is_a_dead_ones() -> None:
    now = time.monotonic()
    fleet = Fleet(_NoRedis(), "p")  # type: ignore[arg-type]
    fleet.update({"a": beat("a", 1.0)}, now - protocol.HEARTBEAT_TTL_S - 1)
    fleet.update({"a": beat("a", 1.0)}, now)
    assert list(fleet) == []


def test_a_paused_replica_is_chosen_only_where_there_is_no_other() -> None:
    skipped_replica, working = replica("resting"), replica("working")
    skipped_replica.heartbeat.paused = True
    for number in range(20):
        assert choose_replica([skipped_replica, working], prefix_key([number], "t"), 8) is working
    assert choose_replica([skipped_replica], b"k", 8) is skipped_replica


def hit_rate(route: Callable[[bytes], int], prefixes: list[bytes], capacity: int) -> float:
    """Part of requests whose prefix is still at the replica that gets them."""
    caches: dict[int, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
    hits = 0
    for prefix in prefixes:
        cache = caches[route(prefix)]
        hits += prefix in cache
        cache[prefix] = None
        cache.move_to_end(prefix)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits / len(prefixes)


def test_affinity_finds_prefixes_that_random_choice_does_not() -> None:
    """Four replicas with room for a quarter of 80 prefixes each; one leaves and comes back."""
    rng = random.Random(1)
    replicas = [replica(f"r{number}") for number in range(4)]
    keys = [prefix_key([number] * 70, "tenant") for number in range(80)]
    asked = [rng.choice(keys) for _ in range(4000)]
    served = iter(range(len(asked)))

    def by_affinity(key: bytes) -> int:
        away = 1000 <= next(served) < 1500
        chosen = choose_replica(replicas[1:] if away else replicas, key, 8)
        assert chosen is not None
        return replicas.index(chosen)

    affine = hit_rate(by_affinity, asked, 24)
    blind = hit_rate(lambda key: rng.randrange(4), asked, 24)
    assert affine > 0.8
    assert blind < 0.4


def test_a_gateway_in_a_replicas_pod_prefers_that_replica_while_it_isnt_busier() -> None:
    for running, prefers in ((0, True), (8, True), (9, False)):
        replicas = [replica("a"), replica("b", running=running), replica("c")]
        keys = [prefix_key([number], "t") for number in range(40)]
        homes = {
            choice.heartbeat.replica_id
            for key in keys
            if (choice := choose_replica(replicas, key, 8, local_id="b"))
        }
        assert (homes == {"b"}) is prefers
        assert prefers or "b" not in homes
    away = choose_replica([replica("a"), replica("b", state="draining")], b"k", 8, local_id="b")
    assert away is not None
    assert away.heartbeat.replica_id == "a"
