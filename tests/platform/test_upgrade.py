"""`manage.py upgrade`: what it says before it changes anything."""

from __future__ import annotations

import time
from io import StringIO
from typing import Any

import pytest
import redis
from django.core.management import CommandError, call_command
from django.db import migrations, models
from django.db.migrations.executor import MigrationExecutor

from config.management.commands import upgrade
from engine.contract import messages, redis_keys
from engine.contract.message_version import MESSAGE_VERSION
from engine.contract.messages import Heartbeat, ModelInfo
from engine.system.redis_client import sync_client

pytestmark = pytest.mark.django_db


def check() -> str:
    out = StringIO()
    call_command("upgrade", "--check", stdout=out)
    return out.getvalue()


def start_replica(client: redis.Redis, prefix: str, version: int) -> None:
    model = ModelInfo(name="m", path="", max_model_len=1, vocab_size=1, dtype="float32")
    now = time.time()
    beat = Heartbeat(
        replica_id="m-0",
        incarnation="i",
        state="ready",
        model=model,
        at=now,
        progress_at=now,
        message_version=version,
    )
    client.set(redis_keys.replica_key("m-0", prefix), messages.encode(beat))
    client.sadd(redis_keys.replicas_key(prefix), "m-0")


def test_an_upgrade_within_one_version_of_messages_needs_no_stop(
    live_redis: str, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_replica(sync_client(live_redis), key_prefix, MESSAGE_VERSION + 1)
    monkeypatch.setenv("QUIRE_LOGIN_ATEMPTS", "3")
    printed = check()
    assert "Database: no migrations." in printed
    assert f"Messages: version {MESSAGE_VERSION}." in printed
    assert "QUIRE_LOGIN_ATEMPTS" in printed
    assert "The old release can run until its processes are replaced." in printed


def test_a_replica_with_messages_of_a_distant_version_must_be_stopped(
    live_redis: str, key_prefix: str
) -> None:
    start_replica(sync_client(live_redis), key_prefix, MESSAGE_VERSION + 2)
    out = StringIO()
    with pytest.raises(CommandError, match="Stop gateways, workers and replicas"):
        call_command("upgrade", "--check", stdout=out)
    assert f"m-0 has messages of version {MESSAGE_VERSION + 2}" in out.getvalue()


def test_migrations_are_named_and_breaking_ones_need_a_stop(
    live_redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Add(migrations.Migration):
        operations = [migrations.AddField("tenant", "x", models.IntegerField(null=True))]

    class Remove(migrations.Migration):
        operations = [migrations.RemoveField("tenant", "x")]

    plan: list[Any] = [(Add("0002_add", "tenants"), False)]
    monkeypatch.setattr(MigrationExecutor, "migration_plan", lambda *args: plan)
    assert "Database: tenants.0002_add" in check()
    plan.append((Remove("0003_remove", "tenants"), False))
    with pytest.raises(CommandError):
        check()
    assert not upgrade.is_breaking(plan[0][0])


def test_once_the_old_release_is_stopped_breaking_migrations_are_run(
    live_redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Remove(migrations.Migration):
        operations = [migrations.RemoveField("tenant", "x")]

    plan = [(Remove("0002_remove", "tenants"), False)]
    monkeypatch.setattr(MigrationExecutor, "migration_plan", lambda *args: plan)
    commands: list[str] = []
    monkeypatch.setattr(upgrade, "call_command", lambda name, **options: commands.append(name))
    out = StringIO()
    call_command("upgrade", stdout=out)
    assert commands == ["migrate"]
    assert "tenants.0002_remove changes what the old release uses." in out.getvalue()
    assert "The old release can run" not in out.getvalue()


@pytest.mark.parametrize(
    ("field", "is_breaking"),
    [
        (models.IntegerField(null=True), False),
        (models.IntegerField(db_default=0), False),
        (models.ManyToManyField("tenants.Tenant"), False),
        (models.IntegerField(default=0), True),
    ],
)
def test_a_column_that_rows_of_the_old_release_have_no_value_for_is_breaking(
    field: models.Field[Any, Any], is_breaking: bool
) -> None:
    class Add(migrations.Migration):
        operations = [migrations.AddField("tenant", "x", field)]

    assert upgrade.is_breaking(Add("0002_add", "tenants")) == is_breaking
