"""`sleep_model` and `wake_model`: words in replicas' inboxes, audited."""

import threading
import time
from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.core.management.base import CommandError

from catalog import actions
from catalog.models import Replica, ServedModel
from common.errors import PermissionDenied
from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.errors import InvalidRequest
from engine.contract.messages import ControlRequest
from tenants.actors import SYSTEM_ACTOR
from tenants.models import AuditEntry
from tests.platform.conftest import World


def make(enable: bool = True, **states: str) -> ServedModel:
    model = ServedModel.objects.create(
        name="m", source="hub/m", settings={"enable_sleep_mode": True} if enable else {}
    )
    for replica_id, state in states.items():
        Replica.objects.create(served_model=model, replica_id=replica_id, state=state)
    return model


def controls_of(url: str, prefix: str, replica_id: str) -> list[Any]:
    client = redis.Redis.from_url(url)
    entries = client.xrange(redis_keys.inbox_key(replica_id, prefix))
    client.close()
    return [protocol.decode_inbox(fields[protocol.STREAM_FIELD]) for _, fields in entries]


def test_those_that_serve_are_told(world: World, live_redis: str, key_prefix: str) -> None:
    make(r1="ready", r2="failed", r3="sleeping")
    call_command("sleep_model", "m", "--level", "2")
    for replica_id in ("r1", "r3"):
        assert controls_of(live_redis, key_prefix, replica_id) == [
            ControlRequest(command="sleep", level=2)
        ]
    assert controls_of(live_redis, key_prefix, "r2") == []
    assert AuditEntry.objects.filter(action="replica.sleep").count() == 2


def test_those_that_sleep_are_woken(world: World, live_redis: str, key_prefix: str) -> None:
    make(r1="ready", r3="sleeping")
    call_command("wake_model", "m", "--tags", "weights")
    assert controls_of(live_redis, key_prefix, "r1") == []
    expected = ControlRequest(command="wake_up", tags=["weights"])
    assert controls_of(live_redis, key_prefix, "r3") == [expected]


@pytest.mark.django_db(transaction=True)
def test_waiting_returns_when_it_sleeps(
    world: World, live_redis: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make(r1="ready")

    def fall_asleep() -> None:
        time.sleep(0.3)
        Replica.objects.update(state="sleeping")

    sleeper = threading.Thread(target=fall_asleep)
    sleeper.start()
    call_command("sleep_model", "m", "--wait")
    sleeper.join()
    assert capsys.readouterr().out == "m sleeps.\n"


def test_waiting_too_long_is_one_clear_line(world: World, live_redis: str) -> None:
    make(r1="sleeping")
    with pytest.raises(CommandError, match="r1 is sleeping, not ready, after 0 s"):
        call_command("wake_model", "m", "--wait", "--timeout", "0")


@pytest.mark.parametrize("command", ["sleep_model", "wake_model"])
def test_nobody_to_tell(world: World, command: str) -> None:
    make(r1="failed")
    with pytest.raises(CommandError, match="No replica of m is"):
        call_command(command, "m")


def test_it_must_have_been_allowed(world: World) -> None:
    make(enable=False, r1="ready")
    with pytest.raises(CommandError, match="without --enable-sleep-mode"):
        call_command("sleep_model", "m")


def test_only_operators_may(world: World) -> None:
    model = make(r1="ready")
    for operation in (actions.sleep_model, actions.wake_model):
        with pytest.raises(PermissionDenied):
            operation(actor=world.owner, model=model)


@pytest.mark.parametrize("options", [{"level": 0}, {"level": 3}])
def test_levels_are_checked(world: World, options: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        actions.sleep_model(actor=SYSTEM_ACTOR, model=make(r1="ready"), **options)
    assert caught.value.param == "level"
