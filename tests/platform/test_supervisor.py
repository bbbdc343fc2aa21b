"""The supervisor with replicas that speak the real protocol."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import msgspec
import pytest
import redis
from django.core.management import call_command
from django.db import OperationalError

from catalog import actions
from catalog.checkpoint import Checkpoint
from catalog.devices import device_environment, visible_devices
from catalog.heartbeats import publish_replica_exit
from catalog.models import Replica, ReplicaState, ServedModel
from catalog.supervisor import Supervisor, replica_id_of
from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.messages import EngineRequest, ReplicaEvent
from engine.contract.sampling_params import SamplingParams
from engine.system.step_record import LastStep
from tenants.actors import SYSTEM_ACTOR
from tests.platform.test_processes import gone

FAKE = [sys.executable, "-m", "tests.fakes.fake_replica"]

pytestmark = [pytest.mark.django_db(transaction=True)]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.fixture
def supervisor(live_redis: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setattr("catalog.supervisor.SYNC_S", 0.05)
    supervisor = Supervisor(program=FAKE, node="here", drain_seconds=1)
    yield supervisor
    supervisor.kill()


def tick_until(supervisor: Supervisor, condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            rows = list(Replica.objects.values_list("replica_id", "state", "detail"))
            pytest.fail(f"not within 30 s: {what}; rows {rows}")
        supervisor.tick()
        time.sleep(0.02)


def states() -> list[str]:
    return list(Replica.objects.values_list("state", flat=True))


def ready(count: int = 1) -> Callable[[], bool]:
    return lambda: states() == ["ready"] * count


def test_what_replicas_will_take_is_logged_before_they_start(
    supervisor: Supervisor,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoint = Checkpoint("X", "safetensors", 8 << 30, 1)
    monkeypatch.setattr("catalog.memory_plan.checkpoint_of", lambda source, settings: checkpoint)
    monkeypatch.setattr("catalog.memory_plan.total_memory", lambda: 12 << 30)
    caplog.set_level("INFO", logger="catalog.supervisor")
    settings = {"tensor_parallel_size": 2}
    for name, num_replicas, total in (("m", 1, 1), ("n", 2, 3)):
        actions.load_model(
            actor=SYSTEM_ACTOR,
            name=name,
            source=folder,
            settings=settings,
            num_replicas=num_replicas,
        )
        tick_until(supervisor, ready(total), "they are ready")
    lines = [record.getMessage().replace("\xa0", " ") for record in caplog.records]
    plans = [number for number, line in enumerate(lines) if " in each: about " in line]
    starts = [number for number, line in enumerate(lines) if "starts as process" in line]
    assert [plan < start for plan, start in zip(plans, starts[:2], strict=True)] == [True, True]
    assert lines[plans[0]].startswith("m: 1 replica of 2 ranks, 5.2 GB in each: about 10.4 GB of")
    assert lines[plans[1]].endswith("which is too much.")


def test_a_loaded_model_gets_its_replicas_and_rows_that_tell_of_them(
    supervisor: Supervisor, folder: str
) -> None:
    actions.load_model(actor=SYSTEM_ACTOR, name="org/m", source=folder, num_replicas=2)
    tick_until(supervisor, ready(2), "two replicas are ready")
    rows = list(Replica.objects.all())
    assert [row.replica_id for row in rows] == [
        replica_id_of(ServedModel.objects.get(), index, "here") for index in (0, 1)
    ]
    assert {row.host for row in rows} == {"here"}
    assert all(row.pid and row.incarnation and row.last_seen for row in rows)
    tick_until(supervisor, lambda: ServedModel.objects.get().max_model_len == 2048, "the context")


def test_two_replicas_get_the_two_devices_of_the_machine(
    supervisor: Supervisor, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("catalog.devices.DEVICE_FILES", tmp_path / "dev")
    supervisor._devices = visible_devices()
    call_command("load_model", folder, "--name", "m", "--replicas", "2")
    tick_until(supervisor, ready(2), "two replicas are ready")
    pids = Replica.objects.values_list("pid", flat=True)
    devices = {
        field.decode()
        for pid in pids
        for field in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if field.startswith(b"CUDA_VISIBLE_DEVICES=")
    }
    assert devices == {"CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1"}


@pytest.mark.parametrize(
    ("first", "num_ranks", "devices", "expected_devices"),
    [
        (0, 1, ["0", "1"], "0"),
        (3, 1, ["GPU-a", "GPU-b"], "GPU-b"),
        (1, 2, ["0", "1", "2", "3"], "2,3"),
        (2, 2, ["0", "1", "2"], "1,2"),
        (1, 1, ["0"], None),
        (1, 2, ["0", "1"], None),
        (0, 1, [], None),
    ],
)
def test_devices_of_a_replica(
    first: int, num_ranks: int, devices: list[str], expected_devices: str | None
) -> None:
    environment = device_environment(first, num_ranks, devices)
    assert environment.get("CUDA_VISIBLE_DEVICES") == expected_devices


def test_the_operator_names_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-b,")
    assert visible_devices() == ["2", "GPU-b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_devices() == []


def test_rows_are_looked_at_with_news_and_from_time_to_time(
    supervisor: Supervisor, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that another has written is put right."""
    actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    tick_until(supervisor, ready(), "the replica is ready")
    ticks = count(1)
    monkeypatch.setattr(supervisor, "_read_heartbeats", lambda: next(ticks))
    monkeypatch.setattr("catalog.supervisor.MIRROR_S", 1e9)
    Replica.objects.update(state=ReplicaState.FAILED)
    tick_until(supervisor, lambda: next(ticks) > 8, "it has looked a few times")
    assert states() == ["failed"]
    supervisor._beats = {}
    tick_until(supervisor, lambda: states() == ["loading"], "no heartbeat is news")
    Replica.objects.update(state=ReplicaState.FAILED)
    monkeypatch.setattr("catalog.supervisor.MIRROR_S", 0.0)
    tick_until(supervisor, lambda: states() == ["loading"], "it's time to look")


def test_a_killed_replica_comes_back_as_a_new_incarnation(
    supervisor: Supervisor, folder: str
) -> None:
    actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    tick_until(supervisor, ready(), "the replica is ready")
    initial_replica = Replica.objects.get()
    assert initial_replica.pid is not None
    os.kill(initial_replica.pid, signal.SIGKILL)
    tick_until(
        supervisor,
        lambda: Replica.objects.filter(state="ready").exclude(
            incarnation=initial_replica.incarnation
        ),
        "another incarnation is ready",
    )
    after = Replica.objects.get()
    assert after.replica_id == initial_replica.replica_id
    assert (after.restarts, after.pid != initial_replica.pid) == (1, True)


def test_unloading_drains_and_stops(supervisor: Supervisor, folder: str) -> None:
    model = actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    tick_until(supervisor, ready(), "the replica is ready")
    pid = Replica.objects.get().pid
    assert pid is not None
    actions.unload_model(actor=SYSTEM_ACTOR, model=model)
    tick_until(supervisor, lambda: states() == ["stopped"], "the replica has stopped")
    assert gone(pid)
    assert supervisor.slots == {}
    actions.load_model(actor=SYSTEM_ACTOR, name="m")
    tick_until(supervisor, ready(), "it's ready again")


def test_changed_settings_replace_the_process(supervisor: Supervisor, folder: str) -> None:
    model = actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    tick_until(supervisor, ready(), "the replica is ready")
    first = Replica.objects.get().pid
    actions.update_model(actor=SYSTEM_ACTOR, model=model, settings={"max_model_len": 99})
    tick_until(supervisor, lambda: ServedModel.objects.get().max_model_len == 99, "the new context")
    tick_until(supervisor, ready(), "it's ready again")
    assert Replica.objects.get().pid != first


def test_a_model_of_another_node_is_left_alone(supervisor: Supervisor, folder: str) -> None:
    actions.load_model(actor=SYSTEM_ACTOR, name="elsewhere", source=folder, node="there")
    actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    tick_until(supervisor, ready(), "the one of this node is ready")
    assert {slot.served_model_id for slot in supervisor.slots.values()} == {
        ServedModel.objects.get(name="m").pk
    }


def test_stop_leaves_no_process_and_true_rows(supervisor: Supervisor, folder: str) -> None:
    actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder, num_replicas=2)
    tick_until(supervisor, ready(2), "two replicas are ready")
    pids = list(Replica.objects.values_list("pid", flat=True))
    supervisor.stop()
    assert all(gone(pid) for pid in pids if pid is not None)
    assert states() == ["stopped", "stopped"]


def test_a_replica_that_fails_says_why_and_is_tried_again(
    live_redis: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("catalog.supervisor.SYNC_S", 0.05)
    broken = Supervisor(program=[sys.executable, "-c", "raise SystemExit(5)"], node="here")
    actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    tick_until(broken, lambda: states() == ["failed"], "the failure shows")
    assert Replica.objects.get().detail == "the replica exited with status 5"
    tick_until(broken, lambda: Replica.objects.get().restarts >= 1, "it's tried again")
    broken.kill()


def test_with_the_database_away_replicas_go_on(
    supervisor: Supervisor, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    tick_until(supervisor, ready(), "the replica is ready")
    pid = Replica.objects.get().pid
    assert pid is not None

    def away(*_: object, **__: object) -> None:
        raise OperationalError("away")

    with monkeypatch.context() as patched:
        patched.setattr(ServedModel.objects, "filter", away)
        for _ in range(10):
            supervisor.tick()
            time.sleep(0.06)
        assert not gone(pid)
    tick_until(supervisor, ready(), "rows are written again")
    assert Replica.objects.get().pid == pid


def test_a_replica_started_by_hand_is_mirrored_but_not_managed(
    supervisor: Supervisor, live_redis: str, key_prefix: str, folder: str
) -> None:
    from catalog.processes import spawn

    actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder, managed=False)
    hand = spawn(
        [
            *FAKE,
            *("--replica-id", "by-hand", "--redis-url", live_redis),
            *("--key-prefix", key_prefix, "--model-name", "m"),
        ],
        name="by hand",
    )
    try:
        tick_until(supervisor, ready(), "its row is there")
        row = Replica.objects.get()
        assert (row.replica_id, row.pid) == ("by-hand", hand.pid)
        assert supervisor.slots == {}
    finally:
        hand.stop()


def test_a_second_supervisor_does_not_start_a_replica_that_runs(
    supervisor: Supervisor, folder: str
) -> None:
    actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    tick_until(supervisor, ready(), "the replica is ready")
    second = Supervisor(program=FAKE, node="here", drain_seconds=1)
    for _ in range(5):
        second.tick()
        time.sleep(0.06)
    (slot,) = second.slots.values()
    assert slot.process is None
    assert slot.state(None)[0] == ReplicaState.PENDING
    second.kill()


def test_replica_ids_are_plain_and_tell_models_apart() -> None:
    odd = ServedModel(pk=1, name="org/ä b:c" * 20)
    name = replica_id_of(odd, 0, "node")
    assert name.isascii()
    assert " " not in name
    assert len(name) < 100
    assert name != replica_id_of(ServedModel(pk=2, name=odd.name), 0, "node")


def test_fault_48_a_replica_that_a_signal_froze_is_killed_and_replaced(
    supervisor: Supervisor, folder: str
) -> None:
    actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    tick_until(supervisor, ready(), "the replica is ready")
    initial_replica = Replica.objects.get()
    assert initial_replica.pid is not None
    os.kill(initial_replica.pid, signal.SIGSTOP)
    tick_until(
        supervisor,
        lambda: Replica.objects.filter(state="ready").exclude(pid=initial_replica.pid),
        "another process serves",
    )
    assert gone(initial_replica.pid)


def test_a_death_is_told_at_once_and_its_heartbeat_goes(
    supervisor: Supervisor, folder: str, live_redis: str
) -> None:
    actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    tick_until(supervisor, ready(), "the replica is ready")
    row = Replica.objects.get()
    assert row.pid is not None
    with redis.Redis.from_url(live_redis) as client, client.pubsub() as pubsub:
        pubsub.subscribe(redis_keys.replica_events_channel(supervisor.prefix))
        pubsub.get_message(timeout=60)
        os.kill(row.pid, signal.SIGKILL)
        # The supervisor's loop needn't come round for it.
        message = pubsub.get_message(ignore_subscribe_messages=True, timeout=60)
        assert message is not None
        news = protocol.decode_replica_event(message["data"])
        died = ReplicaEvent(replica_id=row.replica_id, incarnation=row.incarnation, held=[])
        assert news == died
        assert client.get(redis_keys.replica_key(row.replica_id, supervisor.prefix)) is None


def test_a_death_is_told_with_the_requests_that_the_process_was_at(
    supervisor: Supervisor, folder: str, live_redis: str
) -> None:
    supervisor.program = [*FAKE, "--token-delay=0.05"]
    actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    tick_until(supervisor, ready(), "the replica is ready")
    row = Replica.objects.get()
    assert row.pid is not None
    params = SamplingParams(max_tokens=2000, ignore_eos=True)
    with redis.Redis.from_url(live_redis) as client, client.pubsub() as pubsub:
        pubsub.subscribe(redis_keys.replica_events_channel(supervisor.prefix))
        pubsub.get_message(timeout=60)
        inbox = redis_keys.inbox_key(row.replica_id, supervisor.prefix)
        for name in ("a", "b~2"):
            request = EngineRequest(
                request_id=name, gateway_id="g", prompt_token_ids=[5], sampling=params
            )
            client.xadd(inbox, {protocol.STREAM_FIELD: protocol.encode(request)})
        outbox = redis_keys.outbox_key("g", supervisor.prefix)
        tick_until(supervisor, lambda: client.xlen(outbox) > 3, "both have tokens")
        os.kill(row.pid, signal.SIGKILL)
        message = pubsub.get_message(ignore_subscribe_messages=True, timeout=60)
        assert message is not None
        news = protocol.decode_replica_event(message["data"])
    assert (news.incarnation, sorted(news.held or [])) == (row.incarnation, ["a", "b~2"])


def test_a_death_whose_heartbeat_has_run_out_is_told_all_the_same(
    live_redis: str,
) -> None:
    with redis.Redis.from_url(live_redis) as client, client.pubsub() as pubsub:
        pubsub.subscribe(redis_keys.replica_events_channel("late"))
        pubsub.get_message(timeout=60)
        assert publish_replica_exit(client, "late", "r", 123, LastStep("gone", ["a"]))
        message = pubsub.get_message(ignore_subscribe_messages=True, timeout=60)
        assert message is not None
        replica_event = protocol.decode_replica_event(message["data"])
        assert replica_event == ReplicaEvent(replica_id="r", incarnation="gone", held=["a"])
        assert not publish_replica_exit(client, "late", "r", 123)


def test_a_process_that_cannot_speak_yet_is_said_to_be_loading(
    supervisor: Supervisor, folder: str, live_redis: str
) -> None:
    supervisor.program = [sys.executable, "-c", "import time; time.sleep(600)"]
    model = actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    key = redis_keys.replica_key(replica_id_of(model, 0, "here"), supervisor.prefix)
    with redis.Redis.from_url(live_redis) as client:
        tick_until(supervisor, lambda: client.exists(key), "it's said to be coming")
        data = client.get(key)
        assert isinstance(data, bytes)
        beat = protocol.decode_heartbeat(data)
        pid = supervisor.slots[beat.replica_id].last_pid
        assert (beat.state, beat.model.name, beat.pid) == ("loading", "m", pid)
        # Again and again, until it speaks itself: what it says is left alone.
        client.delete(key)
        tick_until(supervisor, lambda: client.exists(key), "it's said again")
        replaced = msgspec.structs.replace(beat, incarnation="its own", at=beat.at + 1)
        client.set(key, protocol.encode(replaced))
        for _ in range(5):
            supervisor._next_sync = 0.0
            supervisor.tick()
        assert client.get(key) == protocol.encode(replaced)
        # And nobody waits for one that died before it spoke.
        client.delete(key)
        tick_until(supervisor, lambda: client.exists(key), "it's said again")
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while (remaining_response := client.get(key)) is not None and time.monotonic() < deadline:
            assert protocol.decode_heartbeat(remaining_response).pid == pid  # no tick: no successor
            time.sleep(0.02)
        assert remaining_response is None


def test_changed_settings_replace_one_replica_at_a_time(
    supervisor: Supervisor, folder: str
) -> None:
    model = actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder, num_replicas=2)
    tick_until(supervisor, ready(2), "two replicas are ready")
    first = set(Replica.objects.values_list("pid", flat=True))
    actions.update_model(actor=SYSTEM_ACTOR, model=model, settings={"max_model_len": 99})

    def replaced() -> bool:
        assert "ready" in states()  # at every look
        return ready(2)() and first.isdisjoint(Replica.objects.values_list("pid", flat=True))

    tick_until(supervisor, replaced, "both are replaced")
