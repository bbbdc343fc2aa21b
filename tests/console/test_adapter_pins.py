"""Adapters that operators keep in memory: who may, how much, and what replicas are told."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from django.core.management import call_command

from adapters import actions, pins, tasks
from adapters.models import Adapter, AdapterVersion
from adapters.store import content_path
from catalog.models import ServedModel
from common.errors import Conflict, PermissionDenied
from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.lora import AdapterStatus
from engine.contract.messages import ControlRequest
from tenants.actors import CLI_ACTOR, SYSTEM_ACTOR
from tenants.models import AuditEntry, Tenant, User
from tests.console.beats import heartbeat
from tests.console.conftest import Beat, Login
from tests.platform.adapters import ready

pytestmark = pytest.mark.usefixtures("adapter_store", "login")
REPLICA = "quill-1"


def live(name: str = "tone", tenant: str | None = "acme", seed: int = 0) -> AdapterVersion:
    """A version that answers."""
    owner = Tenant.objects.get(slug=tenant) if tenant else None
    version = ready(
        SYSTEM_ACTOR, owner, ServedModel.objects.get(name="quill"), name=name, seed=seed
    )
    actions.promote(actor=SYSTEM_ACTOR, version=version)
    return version


def says(beat: Beat, *pinned: AdapterVersion, capacity: int = 1 << 30, slots: int = 0) -> None:
    """A replica's heartbeat."""
    states = [AdapterStatus(digest=v.digest, tier="device", pinned=True) for v in pinned]
    stats = {"adapter_capacity_bytes": capacity, "adapter_slots": slots}
    beat(heartbeat(REPLICA, adapters=states, stats=stats))


@pytest.fixture
def words(live_redis: str, key_prefix: str) -> Any:
    """What the replica was told since: digest -> whether to pin it."""
    client = redis.Redis.from_url(live_redis)
    key = redis_keys.inbox_key(REPLICA, key_prefix)

    def read_pins() -> dict[str, bool]:
        inboxes = [protocol.decode_inbox(fields[protocol.STREAM_FIELD])
                for _, fields in client.xrange(key)]  # fmt: skip
        client.delete(key)
        pins = {}
        for control in inboxes:
            assert isinstance(control, ControlRequest)
            assert control.command == "load_adapter"
            assert control.adapter is not None
            assert control.adapter.path == str(content_path(control.adapter.digest))
            pins[control.adapter.digest] = control.pin
        return pins

    yield read_pins
    client.close()


def test_replicas_are_told_what_a_pinned_name_stands_for(beat: Beat, words: Any) -> None:
    first = live()
    adapter, other = first.adapter, live("other", seed=9)
    actions.pin(actor=CLI_ACTOR, adapter=adapter)
    says(beat)
    tasks.keep_pins()
    assert words() == {first.digest: True}
    says(beat, first)
    assert pins.sync_pins() == 0
    second = ready(SYSTEM_ACTOR, adapter.tenant, adapter.served_model, seed=2)
    actions.promote(actor=SYSTEM_ACTOR, version=second, percent=10)
    pins.sync_pins()
    assert words() == {second.digest: True}, "a canary answers, too"
    actions.promote(actor=SYSTEM_ACTOR, version=second)
    says(beat, first, second)
    pins.sync_pins()
    assert words() == {first.digest: False}
    says(beat, second, other)
    actions.unpin(actor=CLI_ACTOR, adapter=adapter)
    pins.sync_pins()
    assert words() == {second.digest: False, other.digest: False}


def test_only_replicas_of_its_model_that_serve_are_told(beat: Beat, words: Any) -> None:
    actions.pin(actor=CLI_ACTOR, adapter=live().adapter)
    budget = {"adapter_capacity_bytes": 1 << 30}
    beat(heartbeat(REPLICA, model="another", stats=budget))
    assert pins.sync_pins() == 0
    beat(heartbeat(REPLICA, state="sleeping", stats=budget))
    assert pins.sync_pins() == 0


def test_at_most_half_of_the_memory_may_be_pinned(beat: Beat, words: Any) -> None:
    first, second = live(), live("second", tenant=None, seed=2)
    size = first.num_bytes
    says(beat, capacity=4 * size - 1)
    actions.pin(actor=CLI_ACTOR, adapter=first.adapter)
    with pytest.raises(Conflict, match=rf"1 versions of {size} bytes are pinned") as refused:
        actions.pin(actor=CLI_ACTOR, adapter=second.adapter)
    assert refused.value.code == pins.FULL
    assert not Adapter.objects.get(pk=second.adapter_id).pinned
    says(beat, capacity=4 * size)
    actions.pin(actor=CLI_ACTOR, adapter=second.adapter)
    says(beat, capacity=4 * size - 1)  # another replica came, which has less
    pins.sync_pins()
    assert words() == {first.digest: True}
    says(beat, capacity=1 << 30, slots=2)
    with pytest.raises(Conflict, match="and 1 slots"):
        actions.pin(actor=CLI_ACTOR, adapter=live("third", seed=3).adapter)


def test_pins_are_operators_and_leave_audit_rows(login: Login) -> None:
    adapter = live().adapter
    with pytest.raises(PermissionDenied):
        actions.pin(actor=User.objects.get(username="ada"), adapter=adapter)
    path = f"/console/adapters/{adapter.pk}/"
    assert login("ada").post(f"{path}pin/", {"tenant": "acme"}).status_code == 403
    assert "Pin the adapter" not in login("ada").get(f"{path}?tenant=acme").content.decode()
    root = login("root")
    text = root.post(f"{path}pin/", {"tenant": "acme"}, follow=True).content.decode()
    assert "is pinned: every replica" in text
    assert "pinned in memory" in text
    text = root.post(
        f"{path}pin/", {"tenant": "acme", "pinned": "no"}, follow=True
    ).content.decode()
    assert "Pin the adapter" in text
    rows = AuditEntry.objects.filter(action__in=("adapter.pin", "adapter.unpin")).order_by("pk")
    assert [(row.action, row.details["changes"]) for row in rows] == [
        ("adapter.pin", {"pinned": [False, True]}),
        ("adapter.unpin", {"pinned": [True, False]}),
    ]


def test_commands_pin_and_unpin(capsys: Any) -> None:
    live()
    call_command("pin_adapter", "tone", tenant="acme")
    call_command("list_adapters")
    assert "  yes  " in capsys.readouterr().out
    call_command("unpin_adapter", "tone", tenant="acme")
    call_command("list_adapters")
    assert "  yes  " not in capsys.readouterr().out
