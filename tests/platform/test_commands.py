"""The commands for tenants, keys, models and usage."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command, load_command_class
from django.db import connection
from django.utils import timezone

from catalog import wait
from catalog.models import Replica, ServedModel
from metering.access import UsageRecord, settle
from metering.models import UsageEntry
from tenants.authentication import AuthenticationFailed, authenticate
from tenants.management.commands.create_key import parse_expiry
from tenants.models import ApiKey, AuditEntry, Role, Tenant
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db]

COMMANDS = {
    "tenants": ("create_tenant", "create_key", "list_keys", "revoke_key"),
    "catalog": (
        *("load_model", "unload_model", "list_models", "engine", "supervise"),
        *("sleep_model", "wake_model"),
    ),
    "metering": ("drain_usage",),
    "config": ("up", "chat", "gateway"),
}


def run(*words: str) -> str:
    out = StringIO()
    call_command(*words, stdout=out)
    return out.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    made = tmp_path / "tiny-model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    return str(made)


@pytest.mark.parametrize("app", COMMANDS)
def test_help_tells_what_a_command_and_each_option_do(app: str) -> None:
    for name in COMMANDS[app]:
        command = load_command_class(app, name)
        parser = command.create_parser("manage.py", name)
        assert len(command.help) > 30, name
        for action in parser._actions:
            plain = action.dest in ("requests_per_minute", "tokens_per_minute")
            numbers = action.dest in ("temperature", "max_tokens", "seed")
            assert action.help or plain or numbers, f"{name} --{action.dest}"
        assert parser.format_help()


# -- tenants and keys -------------------------------------------------------------------------


def test_a_tenant_is_made_with_owner_and_limits(world: World) -> None:
    out = run("create_tenant", "Blue Sky", "--owner", "member", "--weight", "2")
    assert out.strip() == "blue-sky"
    tenant = Tenant.objects.get(slug="blue-sky")
    assert tenant.weight == 2
    assert tenant.memberships.get().role == Role.OWNER
    assert AuditEntry.objects.first().actor_label == "command line"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("create_tenant", "Acme"), "already a tenant acme"),
        (("create_tenant", "X", "--owner", "nobody"), "no user 'nobody'"),
        (("create_tenant", "X", "--weight", "-3"), "weight"),
        (("create_key", "--tenant", "nope"), "Tenants: acme, rival"),
        (("create_key", "--tenant", "acme", "--scopes", "root"), "'root' is no scope"),
        (("create_key", "--tenant", "acme", "--expires", "soon"), "use 90d"),
        (("create_key", "--tenant", "acme", "--expires", "2020-01-01"), "in the future"),
        (("revoke_key", "sk-quire-0000000000"), "There is no key"),
        (("unload_model", "nope"), "Models: none yet"),
        (("sleep_model", "nope"), "Models: none yet"),
        (("wake_model", "nope"), "Models: none yet"),
        (("load_model", "/no/such/folder"), "There is no folder"),
        (("load_model", "hub/m", "--max-num-seqs", "0"), "max_num_seqs"),
    ],
)
def test_mistakes_are_one_clear_line(world: World, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(CommandError) as caught:
        run(*words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.django_db(transaction=True)
def test_a_plain_key_is_the_only_output_and_works_until_revoked(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run("create_key", "--tenant", "acme", "--plain", "--name", "script", "--expires", "1d")
    secret = out.removesuffix("\n")
    assert "\n" not in secret
    assert capsys.readouterr().err == ""
    assert asyncio.run(authenticate(f"Bearer {secret}")).tenant == "acme"
    listed = run("list_keys", "--tenant", "acme")
    assert secret[:19] in listed
    assert secret not in listed
    assert "revoked" in run("revoke_key", secret[:19] + "...")
    assert "already" in run("revoke_key", secret)
    assert secret[:19] not in run("list_keys")
    assert secret[:19] in run("list_keys", "--all")
    with pytest.raises(AuthenticationFailed):
        asyncio.run(authenticate(f"Bearer {secret}"))


def test_a_key_that_is_not_plain_comes_with_a_word_of_advice(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run("create_key", "--tenant", "acme", "--scopes", "inference,models:read")
    assert out.startswith("sk-quire-")
    assert "can't be shown again" in capsys.readouterr().err
    assert ApiKey.objects.order_by("-pk")[0].scopes == ["inference", "models:read"]


def test_expiry_is_a_span_or_a_date() -> None:
    assert abs(parse_expiry("90d") - timezone.now() - timedelta(days=90)) < timedelta(minutes=1)
    assert abs(parse_expiry("12h") - timezone.now() - timedelta(hours=12)) < timedelta(minutes=1)
    assert parse_expiry("2030-01-31") == datetime(2030, 1, 31, tzinfo=UTC)
    assert parse_expiry("2030-01-31T12:30") == datetime(2030, 1, 31, 12, 30, tzinfo=UTC)
    for wrong in ("", "soon", "2030-13-01", "-1d", "1w"):
        with pytest.raises(CommandError):
            parse_expiry(wrong)


@pytest.mark.django_db(transaction=True)
def test_a_database_that_is_not_set_up_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db import OperationalError

    def missing(*_: object, **__: object) -> None:
        raise OperationalError("no such table: tenants_apikey")

    monkeypatch.setattr(ApiKey.objects, "select_related", missing)
    with pytest.raises(CommandError, match=r"manage\.py migrate"):
        run("list_keys")


# -- models -----------------------------------------------------------------------------------


def test_a_model_is_loaded_under_its_folders_name_with_settings(world: World, folder: str) -> None:
    out = run(
        *("load_model", folder, "--max-model-len", "64", "--no-enable-prefix-caching"),
        *("--replicas", "2", "--tenant", "acme"),
    )
    assert "tiny-model is being loaded" in out
    model = ServedModel.objects.get()
    assert model.settings == {"max_model_len": 64, "enable_prefix_caching": False}
    assert (model.num_replicas, model.public) == (2, False)
    with pytest.raises(CommandError, match="being loaded already"):
        run("load_model", folder)
    assert "is being unloaded" in run("unload_model", "tiny-model")
    run("load_model", "tiny-model")
    model.refresh_from_db()
    assert model.settings == {"max_model_len": 64, "enable_prefix_caching": False}


def test_a_load_for_an_unknown_tenant_loads_nothing(world: World, folder: str) -> None:
    with pytest.raises(CommandError, match="no tenant 'nope'"):
        run("load_model", folder, "--tenant", "nope")
    assert not ServedModel.objects.exists()


def test_the_list_shows_replicas_and_what_is_wrong(
    world: World, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("load_model", folder, "--name", "m")
    model = ServedModel.objects.get()
    Replica.objects.create(served_model=model, replica_id="r1", state="ready")
    Replica.objects.create(served_model=model, replica_id="r2", state="failed", detail="no memory")
    out = run("list_models")
    assert "1 failed, 1 ready" in out
    assert "r2: no memory" in capsys.readouterr().err


def test_waiting_ends_with_readiness(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = iter(["loading", "loading", "ready"])

    def turn(seconds: float) -> None:
        Replica.objects.update_or_create(
            replica_id="r",
            defaults={"served_model": ServedModel.objects.get(), "state": next(states)},
        )

    monkeypatch.setattr(wait.time, "sleep", turn)
    assert "m is ready" in run("load_model", folder, "--name", "m", "--wait")
    assert capsys.readouterr().err.count("r is loading") == 1


def test_waiting_ends_with_a_failure_and_its_reason(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(seconds: float) -> None:
        Replica.objects.create(
            served_model=ServedModel.objects.get(), replica_id="r", state="failed", detail="no room"
        )

    monkeypatch.setattr(wait.time, "sleep", fail)
    with pytest.raises(CommandError, match="m can't be loaded: no room"):
        run("load_model", folder, "--name", "m", "--wait")


def test_waiting_without_a_supervisor_says_so_and_ends(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wait, "PICKED_UP_S", 0.0)
    with pytest.raises(CommandError, match="not ready after 1 s"):
        run("load_model", folder, "--name", "m", "--wait", "--timeout", "1")
    assert "No supervisor has taken it up" in capsys.readouterr().err


def test_an_unload_waits_until_the_replica_is_gone(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("load_model", folder, "--name", "m")
    model = ServedModel.objects.get()
    Replica.objects.create(served_model=model, replica_id="r", state="draining")
    slept = []

    def turn(seconds: float) -> None:
        slept.append(seconds)
        Replica.objects.update(state="stopped")

    monkeypatch.setattr(wait.time, "sleep", turn)
    assert "m is unloaded" in run("unload_model", "m", "--wait")
    assert len(slept) == 1


def test_the_engine_command_becomes_the_engines_process(
    live_redis: str, key_prefix: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr("os.execvp", lambda program, command: commands.append(command))
    monkeypatch.setattr("os.chdir", lambda path: None)
    run("engine", folder, "--name", "m", "--max-model-len", "32", "--replica-id", "mine")
    run("engine", "m", "--replica-id", "second")
    first, second = commands
    for flag in ("--replica-id=mine", f"--key-prefix={key_prefix}", "--max-model-len=32"):
        assert flag in first
    assert f"--redis-url={live_redis}" in first
    assert f"--model={folder}" in second
    model = ServedModel.objects.get()
    assert (model.managed, model.desired_state) == (False, "loaded")


# -- usage ------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_usage_is_drained_by_hand(world: World, live_redis: str) -> None:
    record = UsageRecord(
        request_id="r",
        tenant_id=world.acme.pk,
        endpoint="chat",
        model="m",
        prompt_tokens=1,
        completion_tokens=1,
        status=200,
        started_at=time.time(),
        duration_ms=1,
    )
    asyncio.run(settle(record))
    assert run("drain_usage") == "1 records written.\n"
    assert run("drain_usage", "--claim-after", "0") == "0 records written.\n"
    assert UsageEntry.objects.count() == 1
    connection.close()


def test_without_redis_a_command_says_where_it_looked(settings: Any) -> None:
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    with pytest.raises(CommandError, match="Redis at unix:///nowhere"):
        run("drain_usage")
