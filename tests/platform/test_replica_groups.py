"""The supervisor with replicas that share experts, and with a replica and its successor."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import redis

from catalog import actions
from catalog.checkpoint import Checkpoint
from catalog.models import Replica, ServedModel
from catalog.supervisor import Supervisor
from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.errors import InvalidRequest
from engine.system.host import PREDECESSOR_VARIABLE
from tenants.actors import SYSTEM_ACTOR
from tests.platform.test_supervisor import folder, ready, states, supervisor, tick_until

__all__ = ["folder", "supervisor"]

pytestmark = [pytest.mark.django_db(transaction=True)]


def test_replicas_that_share_experts_start_and_end_together(
    supervisor: Supervisor, folder: str, live_redis: str, key_prefix: str
) -> None:
    settings = {"enable_expert_parallel": True}
    model = actions.load_model(
        actor=SYSTEM_ACTOR, name="m", source=folder, settings=settings, num_replicas=2
    )

    def launched() -> list[tuple[str | None, ...]]:
        """What the launcher's variables say, by replica."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        fields = [
            dict(
                field.split("=", 1)
                for field in Path(f"/proc/{pid}/environ").read_text().split("\0")
                if "=" in field
            )
            for pid in Replica.objects.values_list("pid", flat=True)
        ]
        return [tuple(map(variables.get, names)) for variables in fields]

    tick_until(supervisor, ready(2), "both are ready")
    first = launched()
    port = first[0][-1]
    assert first == [(rank, "2", "127.0.0.1", port) for rank in ("0", "1")]
    command = supervisor.slots[Replica.objects.all()[0].replica_id].command
    assert {
        "--data-parallel-size=2", "--distributed-executor-backend=external_launcher"
    } < set(command)  # fmt: skip
    victim, other = Replica.objects.all()
    with redis.Redis.from_url(live_redis) as client, client.pubsub() as events:
        events.subscribe(redis_keys.replica_events_channel(key_prefix))
        os.kill(victim.pid or 0, signal.SIGKILL)
        replaced = Replica.objects.filter(state="ready").exclude(
            incarnation__in=[victim.incarnation, other.incarnation]
        )
        tick_until(supervisor, lambda: replaced.count() == 2, "both are others")
        news = {}
        while len(news) < 2:
            message = events.get_message(ignore_subscribe_messages=True, timeout=5)
            event = protocol.decode_replica_event(message["data"]) if message else None
            if event is not None and not event.alive:
                news[event.incarnation] = event.held
    assert news[other.incarnation] == []  # the cause is none of its requests
    again = launched()
    assert len(set(again)) == 2
    assert {row[-1] for row in again}.isdisjoint({port})
    assert "another replica that shares its experts" in Replica.objects.all()[1].last_exit

    actions.update_model(actor=SYSTEM_ACTOR, model=model, num_replicas=3)
    tick_until(supervisor, ready(3), "there are three")
    assert [row[:2] for row in launched()] == [(rank, "3") for rank in ("0", "1", "2")]
    actions.update_model(actor=SYSTEM_ACTOR, model=model, settings={})
    tick_until(
        supervisor, lambda: ready(3)() and launched() == [(None,) * 4] * 3, "each is on its own"
    )


def test_a_group_serves_until_its_successors_do_where_memory_suffices(
    supervisor: Supervisor, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint("X", "safetensors", 8 << 20, 1)
    monkeypatch.setattr("catalog.memory_plan.checkpoint_of", lambda source, settings: checkpoint)
    settings = {"enable_expert_parallel": True}
    model = actions.load_model(
        actor=SYSTEM_ACTOR, name="m", source=folder, settings=settings, num_replicas=2
    )
    tick_until(supervisor, ready(2), "both are ready")

    def change(size: int) -> None:
        previous, num_previous = set(supervisor.slots), len(supervisor.slots)
        actions.update_model(actor=SYSTEM_ACTOR, model=model, num_replicas=size)

        def replaced() -> bool:
            assert states().count("ready") >= min(size, num_previous)  # at every look
            return previous.isdisjoint(supervisor.slots) and ready(size)()

        tick_until(supervisor, replaced, f"{size} others are ready")

    for size in (3, 1, 2):
        change(size)

    def restart(*, is_followed: bool = True) -> None:
        rows = list(Replica.objects.filter(state="ready"))
        previous, incarnations = set(supervisor.slots), {row.incarnation for row in rows}
        actions.drain_replica(actor=SYSTEM_ACTOR, replica=rows[0])

        def restarted() -> bool:
            assert not is_followed or states().count("ready") >= 2  # at every look
            successors = Replica.objects.filter(state="ready").exclude(incarnation__in=incarnations)
            return successors.count() == 2 and len(supervisor.slots) == 2

        tick_until(supervisor, restarted, "two others are ready")
        assert previous.isdisjoint(supervisor.slots) == is_followed

    restart()
    previous = dict(supervisor.slots)
    actions.drain_replica(actor=SYSTEM_ACTOR, replica=Replica.objects.filter(state="ready")[0])
    tick_until(supervisor, lambda: len(supervisor.slots) == 4, "successors start")
    successor = next(supervisor.slots[key] for key in supervisor.slots if key not in previous)
    Replica.objects.create(served_model=model, replica_id="far", host="elsewhere", restart_of="x")
    os.kill(successor.last_pid, signal.SIGKILL)
    tick_until(supervisor, lambda: supervisor.slots == previous, "those before serve on")
    assert Replica.objects.exclude(restart_of="").get().delete()[0] == 1  # another node's restart
    tick_until(supervisor, ready(2), "two rows are left")
    ports = {
        field
        for slot in supervisor.slots.values()
        for field in Path(f"/proc/{slot.last_pid}/environ").read_text().split("\0")
        if field.startswith("MASTER_PORT=")
    }
    assert len(ports) == 1
    monkeypatch.setattr("catalog.sizing.available_memory", lambda: 1 << 20)
    restart(is_followed=False)


def test_who_shares_experts(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def group(settings: dict[str, object], **columns: int) -> dict[str, object]:
        return ServedModel(settings=settings, **columns).group_settings

    experts = {"enable_expert_parallel": True}
    launched = {"distributed_executor_backend": "external_launcher"}
    assert group(experts, num_replicas=2) == {"data_parallel_size": 2, **launched}
    assert group(experts, num_replicas=2, num_spares=1) == {"data_parallel_size": 3, **launched}
    assert group(experts) == {}
    assert group({}, num_replicas=2) == {}
    assert group({**experts, "tensor_parallel_size": 2}, num_replicas=2) == {
        "data_parallel_size": 2, **launched
    }  # fmt: skip
    assert group({**experts, "pipeline_parallel_size": 2}, num_replicas=2) == {}
    assert group({**experts, "enable_eplb": True}, num_replicas=2) == {}
    for spread in ({"nnodes": 2}, {"distributed_executor_backend": "ray"}):
        assert group({**experts, "tensor_parallel_size": 2, **spread}, num_replicas=2) == {}
    assert group({**experts, "device": "cuda"}, num_replicas=2) == {}
    with pytest.raises(InvalidRequest, match="data_parallel_size must be 1; got 2"):
        actions.load_model(
            actor=SYSTEM_ACTOR, name="m", source=folder, num_replicas=2,
            settings={**experts, "distributed_executor_backend": "ray"},
        )  # fmt: skip
    monkeypatch.setattr("catalog.models.visible_devices", lambda: ["0"])
    assert group(experts, num_replicas=2) == {}  # each has a GPU and all experts
    assert group({**experts, "device": "cpu"}, num_replicas=2)


def load_small(supervisor: Supervisor, folder: str, monkeypatch: pytest.MonkeyPatch) -> ServedModel:
    """A model of which several fit into memory, with its replica ready."""
    checkpoint = Checkpoint("X", "safetensors", 8 << 20, 1)
    monkeypatch.setattr("catalog.memory_plan.checkpoint_of", lambda source, settings: checkpoint)
    model = actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    tick_until(supervisor, ready(), "the replica is ready")
    return model


def test_the_only_replica_serves_until_its_successor_does_where_memory_suffices(
    supervisor: Supervisor, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_small(supervisor, folder, monkeypatch)

    def change(length: int, *, keeps_serving: bool) -> str:
        """The id of the replica that serves in the end."""
        previous_ids = set(
            Replica.objects.filter(state="ready").values_list("replica_id", flat=True)
        )
        actions.update_model(actor=SYSTEM_ACTOR, model=model, settings={"max_model_len": length})

        def replaced() -> bool:
            assert not keeps_serving or "ready" in states()  # at every look
            is_new = ServedModel.objects.get().max_model_len == length
            return is_new and [slot.stopping for slot in supervisor.slots.values()] == [False]

        tick_until(supervisor, replaced, "it is replaced")
        tick_until(supervisor, lambda: states().count("ready") == 1, "one is ready")
        after = Replica.objects.get(state="ready").replica_id
        assert (after not in previous_ids) == keeps_serving
        return after

    first = Replica.objects.get().replica_id
    second = change(99, keeps_serving=True)
    assert "--spare" not in supervisor.slots[second].command

    actions.update_model(actor=SYSTEM_ACTOR, model=model, settings={"max_model_len": 98})
    tick_until(supervisor, lambda: first in supervisor.slots, "its successor starts")
    environment = Path(f"/proc/{supervisor.slots[first].last_pid}/environ").read_text()
    assert f"{PREDECESSOR_VARIABLE}={99 * 16}" in environment  # what the fake says it has
    os.kill(supervisor.slots[first].last_pid, signal.SIGKILL)
    tick_until(supervisor, lambda: ServedModel.objects.get().max_model_len == 98, "it's replaced")
    assert set(supervisor.slots) == {second}
    tick_until(supervisor, lambda: states() == ["ready"], "one row is left")

    monkeypatch.setattr("catalog.sizing.available_memory", lambda: 1 << 20)
    assert change(97, keeps_serving=False) == second


def test_a_change_of_settings_and_of_the_number_at_once_leaves_no_gap(
    supervisor: Supervisor, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_small(supervisor, folder, monkeypatch)
    for size, length in ((2, 99), (1, 98)):
        actions.update_model(
            actor=SYSTEM_ACTOR, model=model, num_replicas=size, settings={"max_model_len": length}
        )

        def changed(size: int = size, length: int = length) -> bool:
            assert "ready" in states()  # at every look
            slots = supervisor.slots.values()
            is_new = [f"--max-model-len={length}" in slot.command for slot in slots]
            return ready(size)() and is_new == [True] * size

        tick_until(supervisor, changed, f"{size} of length {length} are ready")
