"""`restart_model`: one replica after the other, each when the one before is ready again."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.core.management.base import CommandError

from catalog import rollout as rolling
from catalog.actions import drain_replica
from catalog.models import Replica, ServedModel
from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.messages import ControlRequest
from tenants.actors import SYSTEM_ACTOR
from tenants.models import AuditEntry
from tests.platform.conftest import World


def make(**states: str) -> None:
    model = ServedModel.objects.create(name="m", source="hub/m")
    for replica_id, state in states.items():
        Replica.objects.create(
            served_model=model, replica_id=replica_id, state=state, incarnation="first"
        )


class Supervised:
    """Does what a supervisor would, a step each time that the command waits."""

    def __init__(self, url: str, prefix: str, *, ends_as: str = "ready") -> None:
        self._redis, self._prefix, self._ends_as = redis.Redis.from_url(url), prefix, ends_as
        self.seen: list[tuple[list[str], int]] = []

    def drained_ids(self) -> list[str]:
        """Replicas that have been told to drain."""
        return [
            row.replica_id
            for row in Replica.objects.order_by("replica_id")
            if row.restart_of == "first"
            or self._words(row.replica_id) == [ControlRequest(command="drain")]
        ]

    def _words(self, replica_id: str) -> list[Any]:
        entries: Any = self._redis.xrange(redis_keys.inbox_key(replica_id, self._prefix))
        return [protocol.decode_inbox(fields[protocol.STREAM_FIELD]) for _, fields in entries]

    def turn(self, seconds: float) -> None:
        """In the place of `time.sleep`."""
        drained = self.drained_ids()
        self.seen.append((drained, Replica.objects.filter(state="ready").count()))
        row = Replica.objects.get(replica_id=drained[-1])
        row.state = {"ready": "draining", "draining": "loading"}.get(row.state, self._ends_as)
        if row.state == self._ends_as:
            row.incarnation, row.restarts = "second", row.restarts + 1
            row.detail = "No memory." if self._ends_as == "failed" else ""
        row.save()


@pytest.fixture
def supervised(
    world: World, live_redis: str, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> Supervised:
    supervised = Supervised(live_redis, key_prefix)
    monkeypatch.setattr(rolling.time, "sleep", supervised.turn)
    return supervised


def test_one_goes_at_a_time(supervised: Supervised, capsys: pytest.CaptureFixture[str]) -> None:
    make(r1="ready", r2="ready", r3="failed")
    call_command("restart_model", "m", "--wait")
    assert supervised.drained_ids() == ["r1", "r2"]
    assert all(ready >= 1 for drained, ready in supervised.seen)
    assert set(Replica.objects.filter(state="ready").values_list("incarnation", flat=True)) == {
        "second"
    }
    assert AuditEntry.objects.filter(action="replica.drain").count() == 2
    assert capsys.readouterr().out == "m is restarted.\n"


def test_without_waiting_it_returns_once_the_last_one_is_told(supervised: Supervised) -> None:
    make(r1="ready", r2="ready")
    call_command("restart_model", "m")
    assert supervised.drained_ids() == ["r1", "r2"]
    first, last = Replica.objects.order_by("replica_id")
    assert (first.incarnation, last.incarnation) == ("second", "first")


def test_those_that_share_experts_go_together(supervised: Supervised) -> None:
    make(r1="ready", r2="ready")
    ServedModel.objects.update(settings={"enable_expert_parallel": True}, num_replicas=2)
    call_command("restart_model", "m")
    assert supervised.drained_ids() == ["r1", "r2"]
    assert supervised.seen == []  # neither waits for the other


def test_one_node_of_those_that_share_experts_goes_at_a_time(supervised: Supervised) -> None:
    make(r1="ready", r2="ready")
    ServedModel.objects.update(settings={"enable_expert_parallel": True}, num_replicas=2)
    for replica_id, host in (("r1", "a"), ("r2", "b")):
        Replica.objects.filter(replica_id=replica_id).update(host=host)
    call_command("restart_model", "m", "--wait")
    assert supervised.drained_ids() == ["r1", "r2"]
    assert all(ready >= 1 for _, ready in supervised.seen)


@pytest.mark.parametrize("managed", [True, False])
def test_whoever_drains_one_that_shares_experts_drains_its_node(
    supervised: Supervised, managed: bool
) -> None:
    make(r1="ready", r2="ready", r3="ready", r4="loading")
    ServedModel.objects.update(
        settings={"enable_expert_parallel": True}, num_replicas=2, managed=managed
    )
    Replica.objects.filter(replica_id="r3").update(host="b")
    drain_replica(actor=SYSTEM_ACTOR, replica=Replica.objects.get(replica_id="r2"))
    assert supervised.drained_ids() == ["r1", "r2"]


def test_one_that_does_not_come_back_ends_it_before_the_next(
    supervised: Supervised,
) -> None:
    supervised._ends_as = "failed"
    make(r1="ready", r2="ready")
    with pytest.raises(CommandError, match="r1 can't be started again: No memory"):
        call_command("restart_model", "m", "--wait")
    assert supervised.drained_ids() == ["r1"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"state": "failed", "detail": "No memory."}, "r1 can't be started again: No memory"),
        (None, "r1 was removed in the meantime"),
    ],
)
def test_those_that_share_experts_and_do_not_come_back_end_it(
    supervised: Supervised, rows: dict[str, str] | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn(seconds: float) -> None:
        if rows is None:
            Replica.objects.all().delete()
        else:
            Replica.objects.update(incarnation="", **rows)

    make(r1="ready", r2="ready")
    ServedModel.objects.update(settings={"enable_expert_parallel": True}, num_replicas=2)
    monkeypatch.setattr(rolling.time, "sleep", turn)
    with pytest.raises(CommandError, match=words):
        call_command("restart_model", "m", "--wait", "--timeout", "5")


def test_time_ends(supervised: Supervised) -> None:
    make(r1="ready")
    with pytest.raises(CommandError, match="r1 is not ready again after 0 s"):
        call_command("restart_model", "m", "--wait", "--timeout", "0")


def test_without_a_ready_one_there_is_nothing_to_restart(supervised: Supervised) -> None:
    make(r1="loading")
    with pytest.raises(CommandError, match="No replica of m is ready"):
        call_command("restart_model", "m")
