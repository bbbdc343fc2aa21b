"""The commands for tenants, keys, models and usage."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import (
    CommandError,
    call_command,
    get_commands,
    load_command_class,
)
from django.db import connection
from django.utils import timezone

from catalog import actions
from catalog import rollout as wait
from catalog.checkpoint import Checkpoint, KvShape
from catalog.models import Replica, ServedModel
from common.commands import parse_expiry, parse_span
from common.errors import Conflict
from config.help import DJANGO_COMMANDS, GROUPS
from engine.contract import messages, redis_keys
from engine.version import __version__
from metering.access import UsageRecord, settle
from metering.models import UsageEntry
from quire import command_line
from tenants.authentication import AuthenticationFailed, authenticate
from tenants.models import ApiKey, AuditEntry, Role, Tenant
from tests.console.beats import heartbeat
from tests.platform.conftest import World
from tests.platform.instance import ROOT, manage

pytestmark = [pytest.mark.django_db]

COMMANDS = {
    "tenants": (
        *("create_tenant", "list_tenants", "update_tenant"),
        *("create_user", "list_users", "update_user", "delete_user", "set_password"),
        *("list_members", "set_member", "remove_member"),
        *("list_invitations", "revoke_invitation"),
        *("create_service_account", "list_service_accounts", "retire_service_account"),
        *("create_key", "list_keys", "rotate_key", "revoke_key"),
    ),
    "catalog": (
        *("load_model", "unload_model", "delete_model", "list_models", "engine", "supervise"),
        *("sleep_model", "wake_model", "restart_model", "list_tiers", "verify_tier"),
        *("drop_tier", "prune_cache"),
    ),
    "metering": (
        *("drain_usage", "list_prices", "delete_price"),
        *("list_budgets", "delete_budget", "set_webhook"),
    ),
    "adapters": ("set_budget", "set_price"),
    "console": ("status",),
    "accounts": ("invite",),
    "config": ("up", "chat", "gateway", "load_report", "save_quantized"),
}


def run(*words: str) -> str:
    out = StringIO()
    call_command(*words, stdout=out)
    return out.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    model_folder = tmp_path / "tiny-model"
    model_folder.mkdir()
    (model_folder / "config.json").write_text("{}")
    return str(model_folder)


@pytest.mark.parametrize("app", COMMANDS)
def test_help_tells_what_a_command_and_each_option_do(app: str) -> None:
    for name in COMMANDS[app]:
        command = load_command_class(app, name)
        parser = command.create_parser("manage.py", name)
        assert len(command.help) > 30, name
        for action in parser._actions:
            assert action.help, f"{name} --{action.dest}"
        assert parser.format_help()


ALL_HELP_TEXTS = """
import argparse, sys
sys.argv = ["quire", "help"]
from quire import command_line
command_line.main()
from django.core.management import get_commands, load_command_class
from config.help import GROUPS
commands = get_commands()
for name in (name for names in GROUPS.values() for name in names):
    parser = load_command_class(commands[name], name).create_parser("quire", name)
    print(parser.format_help())
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            print(*(form.format_help() for form in action.choices.values()))
"""


@pytest.mark.system
def test_help_under_the_name_quire_names_no_other_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALL_HELP_TEXTS],
        cwd=ROOT,
        env={**os.environ, "QUIRE_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "usage: quire create_key" in done.stdout
    assert "usage: quire bench serve" in done.stdout
    assert "`quire up`" in done.stdout
    assert "manage.py" not in done.stdout


#: `manage.py` is right there: a file's path, a certificate's name.
NAMES_THE_FILE = {
    "platform/config/up/banner.py",
    "platform/config/up/processes.py",
    "platform/common/installation.py",
    "platform/common/settings.py",
}


def test_hints_name_the_program_that_runs() -> None:
    for template in (ROOT / "templates").rglob("*.html"):
        assert "manage.py" not in template.read_text("utf-8"), template
    for folder in ("engine", "inference", "platform", "quire"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text("utf-8")
            if "manage.py" not in text:
                continue
            nodes = list(ast.walk(ast.parse(text)))
            docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
            for node in nodes:
                if isinstance(node, ast.Constant) and node not in docstrings:
                    names_it = isinstance(node.value, str) and "manage.py" in node.value
                    name = str(path.relative_to(ROOT))
                    assert not names_it or name in NAMES_THE_FILE, f"{name}:{node.lineno}"


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
        (("create_tenant", "X", "--owner", "nobody"), "User 'nobody' not found"),
        (("create_tenant", "X", "--weight", "-3"), "weight"),
        (("create_tenant", "你好"), "give one as slug"),
        (("create_key", "--tenant", "nope"), "Tenants: acme, rival"),
        (
            ("create_key", "--tenant", "acme", "--scopes", "root"),
            '--scopes: "root" is not a valid choice. There are inference, models:read, operator, ',
        ),
        (
            ("set_budget", "--tenant", "acme", "--per", "year", "--tokens", "9"),
            '--per: "year" is not a valid choice. There are day, week, month.',
        ),
        (
            ("create_key", "--tenant", "acme", "--max-running-requests", "0"),
            "--max-running-requests: Ensure this value is greater than or equal to 1",
        ),
        (("set_budget", "--tenant", "acme", "--per", "day", "--tokens", "x"), "--tokens: A valid"),
        (("set_price", "m", "--input", "1" * 41, "--output", "1"), "--input: Ensure this field"),
        (("create_key", "--tenant", "acme", "--expires", "soon"), "use 90d"),
        (("create_key", "--tenant", "acme", "--expires", "2020-01-01"), "in the future"),
        (("revoke_key", "sk-quire-0000000000"), "not found. See manage.py list_keys"),
        (("rotate_key", "0000000000"), "See manage.py list_keys"),
        (("rotate_key", "0000000000", "--overlap", "soon"), "use 7d, 12h, 30m or 0"),
        (("update_tenant", "acme"), "Nothing to change"),
        (("update_tenant", "nope", "--off"), "Tenants: acme, rival"),
        (("update_tenant", "acme", "--weight", "0"), "weight"),
        (("update_tenant", "acme", "--name", ""), "name"),
        (("delete_model", "nope"), "Models: none yet"),
        (("unload_model", "nope"), "Models: none yet"),
        (("sleep_model", "nope"), "Models: none yet"),
        (("wake_model", "nope"), "Models: none yet"),
        (("restart_model", "nope"), "Models: none yet"),
        (("create_tenant",), "name"),
        (("create_tenant", "X", "--name", "Y"), "not allowed with"),
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
    for invalid in ("", "soon", "2030-13-01", "-1d", "1w"):
        with pytest.raises(CommandError):
            parse_expiry(invalid)


@pytest.mark.django_db(transaction=True)
def test_a_database_that_is_not_set_up_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db import OperationalError

    def missing(*_: object, **__: object) -> None:
        raise OperationalError("no such table: tenants_apikey")

    monkeypatch.setattr(ApiKey.objects, "select_related", missing)
    with pytest.raises(CommandError, match=r"manage\.py migrate"):
        run("list_keys")


def test_spans_are_minutes_hours_days_or_nothing() -> None:
    assert parse_span("0") == timedelta(0)
    assert parse_span("36h") == timedelta(days=1.5)
    assert [parse_span(text) for text in ("", "1", "1w", "-1d", "1.5h", "\u0663d")] == [None] * 6


@pytest.mark.django_db(transaction=True)
def test_a_key_is_rotated_and_both_work_for_the_overlap(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    old = run("create_key", "--tenant", "acme", "--plain", "--name", "robot").strip()
    new = run("rotate_key", old[:19], "--overlap", "12h").strip()
    assert new.startswith("sk-quire-")
    assert new != old
    err = capsys.readouterr().err
    assert f"{timezone.now() + timedelta(hours=12):%Y-%m-%d %H:}" in err
    assert old[19:] not in err
    for secret in (old, new):
        assert asyncio.run(authenticate(f"Bearer {secret}")).tenant == "acme"
    retained_api_key = ApiKey.objects.get(public_id=new[9:19])
    ending = ApiKey.objects.get(public_id=old[9:19])
    assert retained_api_key.name == ending.name == "robot"
    assert retained_api_key.expires_at is None
    lifetime = ending.expires_at - timezone.now()  # type: ignore[operator]
    assert timedelta(hours=11.9) < lifetime <= timedelta(hours=12)


def test_a_key_rotated_without_overlap_ends_at_once(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    run("rotate_key", world.key.public_id, "--overlap", "0")
    assert "is revoked" in capsys.readouterr().err
    world.key.refresh_from_db()
    assert world.key.state() == "revoked"
    with pytest.raises(CommandError, match="is revoked: make a new one"):
        run("rotate_key", world.key.public_id)
    new = run("create_key", "--tenant", "acme", "--plain").strip()
    with pytest.raises(CommandError, match="overlap must be from 0 to 30 days"):
        run("rotate_key", new, "--overlap", "31d")


def test_a_rotated_plain_key_is_the_only_output(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run("rotate_key", world.key.public_id, "--plain")
    assert out.count("\n") == 1
    assert capsys.readouterr().err == ""


def test_tenants_are_listed_changed_and_switched(world: World) -> None:
    run("update_tenant", "acme", "--name", "Acme GmbH", "--weight", "2.5", "--off")
    run("update_tenant", "rival", "--requests-per-minute", "60", "--kv-max-fraction", "0.5")
    head, acme, rival = run("list_tenants").splitlines()
    assert head.split()[:3] == ["TENANT", "NAME", "STATE"]
    assert acme.split()[:5] == ["acme", "Acme", "GmbH", "off", "2.5"]
    assert rival.split() == [
        *("rival", "Rival", "on", "1", "0%", "to", "50%", "60", "default", "1"),
    ]
    with pytest.raises(CommandError, match="is disabled"):
        run("create_key", "--tenant", "acme")
    run("update_tenant", "acme", "--on")
    assert Tenant.objects.get(slug="acme").active


def test_a_wrong_change_of_a_tenant_changes_nothing(world: World) -> None:
    with pytest.raises(CommandError):
        run("update_tenant", "acme", "--name", "X", "--weight", "-1", "--off")
    tenant = Tenant.objects.get(slug="acme")
    assert (tenant.name, tenant.weight, tenant.active) == ("Acme", 1.0, True)


def test_the_count_of_keys_leaves_out_what_does_not_work(world: World) -> None:
    run("create_key", "--tenant", "acme", "--expires", "1h")
    run("revoke_key", world.key.public_id)
    ApiKey.objects.filter(tenant=world.rival).update(expires_at=timezone.now())
    assert [line.split()[-1] for line in run("list_tenants").splitlines()[1:]] == ["1", "0"]


# -- models -----------------------------------------------------------------------------------


def test_a_model_is_loaded_under_its_folders_name_with_settings(world: World, folder: str) -> None:
    out = run(
        *("load_model", folder, "--max-model-len", "64", "--no-enable-prefix-caching"),
        *("--data-parallel-size", "2", "--tenant", "acme"),
    )
    assert "tiny-model is being loaded" in out
    model = ServedModel.objects.get()
    assert model.settings == {"max_model_len": 64, "enable_prefix_caching": False}
    assert (model.num_replicas, model.public) == (2, False)
    with pytest.raises(CommandError, match="being loaded already"):
        run("load_model", folder)
    with pytest.raises(CommandError, match=r"no reasoning_parser 'x' here\. There are: "):
        run("load_model", folder, "--name", "other", "--reasoning-parser", "x")
    assert "is being unloaded" in run("unload_model", "tiny-model")
    run("load_model", "tiny-model")
    model.refresh_from_db()
    assert model.settings == {"max_model_len": 64, "enable_prefix_caching": False}
    run("load_model", str(Path(folder).rename(Path(folder).with_name("AI Models"))))
    assert ServedModel.objects.filter(name="AI-Models").exists()


def test_what_ranks_take_is_said_and_what_cannot_fit_is_refused(
    world: World, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "catalog.memory_plan"
    checkpoint = Checkpoint("X", "safetensors", 8 << 30, 1)
    monkeypatch.setattr(f"{command}.checkpoint_of", lambda source, settings: checkpoint)
    monkeypatch.setattr(f"{command}.total_memory", lambda: 32 << 30)
    ranks = ("--tensor-parallel-size", "2")
    run("load_model", folder, "--name", "m", *ranks)
    plan = capsys.readouterr().err.replace("\xa0", " ")
    assert "1 replica of 2 ranks, 5.2 GB in each: about 10.4 GB of 32.0 GB on" in plan
    with pytest.raises(CommandError, match=r"can't fit into memory: 4 replicas of 2 ranks"):
        run("load_model", folder, "--name", "n", "--replicas", "4", *ranks)
    assert [model.name for model in ServedModel.objects.all()] == ["m"]
    run("load_model", folder, "--name", "n", "--replicas", "4", "--node", "elsewhere", *ranks)


def test_a_long_context_and_weights_on_another_device_are_not_refused(
    world: World, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = "catalog.memory_plan"
    shape = KvShape(layers=32, kv_heads=8, head_dim=128, windows=(0,) * 32, context=1 << 20)
    checkpoint = Checkpoint("X", "safetensors", 8 << 30, 1, dtype="BF16", shape=shape)
    monkeypatch.setattr(f"{command}.checkpoint_of", lambda source, settings: checkpoint)
    monkeypatch.setattr(f"{command}.total_memory", lambda: 32 << 30)
    run("load_model", folder, "--name", "long")  # by default the KV cache takes a part of the rest
    monkeypatch.setattr(f"{command}.total_memory", lambda: 4 << 30)
    run("load_model", folder, "--name", "gpu", "--device", "cuda")
    monkeypatch.setattr("catalog.models.visible_devices", lambda: ["0"])
    run("load_model", folder, "--name", "auto")  # where there is a GPU, it takes that
    with pytest.raises(CommandError, match="can't fit into memory"):
        run("load_model", folder, "--name", "cpu", "--device", "cpu")


def test_a_model_is_deleted_once_it_is_unloaded(world: World, folder: str) -> None:
    run("load_model", folder, "--name", "m")
    with pytest.raises(CommandError, match="unload it first"):
        run("delete_model", "m")
    run("unload_model", "m")
    assert "out of the catalogue" in run("delete_model", "m")
    assert not ServedModel.objects.exists()


def test_a_load_for_an_unknown_tenant_loads_nothing(world: World, folder: str) -> None:
    with pytest.raises(CommandError, match="Tenant 'nope' not found"):
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


def test_the_list_tells_a_wish_from_what_became_of_it(world: World, folder: str) -> None:
    def listed() -> str:
        return run("list_models").splitlines()[1].split()[1]

    run("load_model", folder, "--name", "m")
    assert listed() == "loading"
    model = ServedModel.objects.get()
    row = Replica.objects.create(
        served_model=model, replica_id="r", state="failed", detail="No memory."
    )
    assert listed() == "failed"
    row.state, row.detail = "ready", ""
    row.save()
    assert listed() == "loaded"
    run("unload_model", "m")
    assert listed() == "unloaded"


def test_a_tenant_may_be_named_by_an_option(world: World) -> None:
    assert run("create_tenant", "--name", "Other Inc").strip() == "other-inc"
    assert Tenant.objects.get(slug="other-inc").name == "Other Inc"


def test_names_of_models_that_nobody_knows_are_pointed_out(
    world: World, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("load_model", folder, "--name", "m", "--alias", "other")
    capsys.readouterr()
    run("create_key", "--tenant", "acme", "--allowed-models", "m,other,nope")
    err = capsys.readouterr().err
    assert "No model or adapter is called nope" in err
    assert err.count("No model or adapter") == 1
    run("update_tenant", "acme", "--allowed-models", "gone")
    assert "No model or adapter is called gone" in capsys.readouterr().err
    run("create_tenant", "Third", "--allowed-models", "m")
    assert "No model or adapter" not in capsys.readouterr().err


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


def test_a_terminal_shows_how_much_of_a_model_is_loaded(
    live_redis: str,
    key_prefix: str,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with redis.Redis.from_url(live_redis) as client:
        beat = heartbeat("r", "m", "loading", load_progress=0.4)
        client.sadd(redis_keys.replicas_key(key_prefix), "r")
        client.set(redis_keys.replica_key("r", key_prefix), messages.encode(beat), px=60_000)

    def turn(seconds: float) -> None:
        Replica.objects.update_or_create(
            replica_id="r",
            defaults={"served_model": ServedModel.objects.get(), "state": "ready"},
        )

    monkeypatch.setattr(wait.time, "sleep", turn)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert "m is ready" in run("load_model", folder, "--name", "m", "--wait")
    drawn = capsys.readouterr().err
    assert f"[{'#' * 12}{'.' * 18}]  40%" in drawn
    assert drawn.endswith("\r\x1b[K")


def test_waiting_ends_with_a_failure_and_its_reason(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(seconds: float) -> None:
        Replica.objects.update_or_create(
            replica_id="r",
            defaults={
                "served_model": ServedModel.objects.get(),
                "state": "failed",
                "detail": "no room",
            },
        )

    monkeypatch.setattr(wait.time, "sleep", fail)
    monkeypatch.setattr(wait, "SEEN_S", 0.0)
    with pytest.raises(CommandError, match="m can't be loaded: no room"):
        run("load_model", folder, "--name", "m", "--wait")
    assert "is being loaded" in run("load_model", "m")
    assert "m could not be loaded before (no room). Trying again." in capsys.readouterr().err


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
    addresses: list[str] = []

    def become(program: str, command: list[str], environment: dict[str, str]) -> None:
        commands.append(command)
        addresses.append(environment["REDIS_URL"])

    monkeypatch.setattr("os.execvpe", become)
    monkeypatch.setattr("os.chdir", lambda path: None)
    run("engine", folder, "--name", "m", "--max-model-len", "32", "--replica-id", "mine")
    run("engine", "m", "--replica-id", "second")
    first, second = commands
    for flag in ("--replica-id=mine", f"--key-prefix={key_prefix}", "--max-model-len=32"):
        assert flag in first
    assert addresses == [live_redis, live_redis]
    assert f"--model={folder}" in second
    model = ServedModel.objects.get()
    assert (model.managed, model.desired_state) == (False, "loaded")
    run("engine", "m", "--replica-id", "third", "--idle-minutes", "5")
    assert ServedModel.objects.get().scales_from_zero
    run("engine", "m", "--replica-id", "fourth")
    assert not ServedModel.objects.get().scales_from_zero


def test_of_engines_that_start_at_once_one_registers_the_model(
    live_redis: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(
        "os.execvpe", lambda program, command, environment: commands.append(command)
    )
    monkeypatch.setattr("os.chdir", lambda path: None)
    load_model = actions.load_model

    def after_another(**columns: Any) -> ServedModel:
        load_model(**columns)
        return load_model(**columns)

    monkeypatch.setattr(actions, "load_model", after_another)
    run("engine", folder, "--name", "m", "--replica-id", "second")
    assert f"--model={folder}" in commands[0]

    def while_it_drains(**columns: Any) -> ServedModel:
        ServedModel.objects.update(desired_state="unloaded")
        raise Conflict("m still drains.")

    ServedModel.objects.update(desired_state="unloaded")
    monkeypatch.setattr(actions, "load_model", while_it_drains)
    with pytest.raises(CommandError, match="still drains"):
        run("engine", folder, "--name", "m", "--replica-id", "third")


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


# -- help -------------------------------------------------------------------------------------


def test_the_overview_has_every_command_of_ours_once() -> None:
    folders = ("platform/*", "chaos")
    paths = [
        one for folder in folders for one in ROOT.glob(f"{folder}/management/commands/[a-z]*.py")
    ]
    ours = {path.parts[-4] for path in paths}
    remote_names = sorted(name for name, app in get_commands().items() if app in ours)
    assert sorted(name for names in GROUPS.values() for name in names) == remote_names
    assert set(DJANGO_COMMANDS) <= get_commands().keys()


@pytest.mark.system
def test_help_alone_shows_the_overview(tmp_path: Path) -> None:
    lines = manage(tmp_path, "help").stdout.splitlines()
    assert any(re.match(r"  create_key +", line) for line in lines)
    assert len(lines) < 60
    assert max(map(len, lines)) <= 96
    done = manage(tmp_path, "--help=all")
    assert re.search(r"^  rotate_key +Replace an API key", done.stdout, re.M)


@pytest.mark.system
def test_errors_are_sentences_and_misspelt_flags_name_the_right_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = manage(tmp_path, "create_key", "--tenant", "nope", check=False)
    assert (done.returncode, done.stderr[:7]) == (1, "Error: ")
    assert "CommandError" not in done.stderr
    with pytest.raises(SystemExit):
        load_command_class("catalog", "load_model").run_from_argv(
            ["manage.py", "load_model", "folder", "--nmae", "x"]
        )
    assert "Did you mean --name?" in capsys.readouterr().err
    assert "status" in manage(tmp_path, "ps", "--help").stdout


@pytest.mark.parametrize("word", ["--version", "version"])
def test_the_version_is_quires(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quire", word])
    command_line.main()
    assert capsys.readouterr().out == f"quire {__version__}\n"


@pytest.mark.system
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "manage.py", "help"],
        cwd=ROOT,
        env={**os.environ, "QUIRE_DATA_DIR": str(tmp_path)},
        stdout=writes,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, "")


def test_prices_are_set_and_listed_with_their_history() -> None:
    assert run("set_price", "small", "--input", "0.15", "--output", "0.6").startswith("small from")
    prices = ("--input", "1", "--cached", "0.5", "--output", "2")
    media = ("--image", "0.002", "--audio-minute", "0.006")
    run("set_price", "small", *prices, *media, "--from", "1h")
    rows = run("list_prices").splitlines()
    assert rows[0].split()[:5] == ["ID", "MODEL", "FROM", "(UTC)", "INPUT"]
    assert [row.split()[4:] for row in rows[1:]] == [
        ["1", "0.5", "2", "0.002", "0.006"],
        ["0.15", "0.15", "0.6", "0", "0"],
    ]
    # Who changes the prices of tokens leaves those of media as they are by then.
    run("set_price", "small", "--input", "3", "--output", "4", "--from", "2h")
    newest, *_ = run("list_prices").splitlines()[1:]
    assert newest.split()[4:] == ["3", "3", "4", "0.002", "0.006"]
    run("set_price", "small", "--input", "3", "--output", "4", "--image", "0", "--from", "3h")
    free, *_ = run("list_prices").splitlines()[1:]
    assert free.split()[4:] == ["3", "3", "4", "0", "0.006"]
    coming, started_part = (row.split()[0] for row in rows[1:])
    assert run("delete_price", coming) == f"Price {coming} is deleted.\n"
    with pytest.raises(CommandError, match=f"Price {coming} not found"):
        run("delete_price", coming)
    assert (
        run("delete_price", started_part) == f"Price {started_part} is deleted.\n"
    )  # nobody was billed
    with pytest.raises(CommandError, match="input_per_million must be a decimal"):
        run("set_price", "small", "--input", "cheap", "--output", "1")


def test_budgets_are_set_listed_with_what_is_spent_and_lifted(
    world: World, live_redis: str
) -> None:
    out = run("set_budget", "--tenant", "acme", "--per", "month", "--amount", "12.50")
    assert "acme a month" in out
    run(
        "set_budget", "--tenant", "acme", "--key", world.key.prefix, "--per", "day", "--tokens", "9"
    )
    lines = run("list_budgets", "--tenant", "acme").splitlines()
    assert lines[0].split()[:5] == ["ID", "TENANT", "KEY", "MODEL", "PER"]
    assert lines[1].split()[2:9] == ["all", "all", "month", "0", "-", "0.000000000", "12.5"]
    assert lines[2].split()[2:7] == [world.key.prefix, "all", "day", "0", "9"]
    number = lines[1].split()[0]
    assert run("delete_budget", number) == f"Budget {number} is deleted.\n"
    with pytest.raises(CommandError, match=r"Budget .* not found"):
        run("delete_budget", number)
    with pytest.raises(CommandError, match="needs tokens, an amount"):
        run("set_budget", "--tenant", "acme", "--per", "day")


def test_a_key_is_narrowed_by_models_endpoints_and_addresses(world: World) -> None:
    words = (
        "--allowed-models",
        "a,b",
        "--endpoints",
        "/v1/embeddings",
        "--addresses",
        "10.0.0.0/8",
    )
    secret = run("create_key", "--tenant", "acme", *words, "--plain").strip()
    api_key = ApiKey.objects.get(public_id=secret[9:19])
    assert (api_key.allowed_models, api_key.endpoints) == (["a", "b"], ["/v1/embeddings"])
    assert api_key.addresses == ["10.0.0.0/8"]
    run("update_tenant", "acme", "--time-zone", "Europe/Berlin", "--max-running-requests", "4")
    world.acme.refresh_from_db()
    assert (world.acme.time_zone, world.acme.max_running_requests) == ("Europe/Berlin", 4)
    with pytest.raises(CommandError, match="isn't a time zone"):
        run("update_tenant", "acme", "--time-zone", "Moon/Tranquility")


def test_no_transcript_replaces_another(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="different names"):
        call_command(
            "transcribe", "a/x.wav", "b/x.mp3", output_dir=str(tmp_path), url="http://127.0.0.1:1"
        )


def test_converted_weights_that_are_no_longer_loaded_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    assert run("prune_cache").split() == ["0", "bytes", "freed."]
    for name, days in (("old", 31), ("recent", 29)):
        entry = tmp_path / "weights" / name
        entry.mkdir(parents=True)
        (entry / "model.safetensors").write_bytes(bytes(2048))
        last_load = time.time() - days * 86_400
        os.utime(entry, (last_load, last_load))
    output = run("prune_cache")
    assert f"{tmp_path}/weights/old" in output
    assert output.replace("\xa0", " ").endswith("2.0 KB freed.\n")
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["recent"]
    with pytest.raises(CommandError, match=r"--unused-for must be .*; got 'later'"):
        run("prune_cache", "--unused-for", "later")
    run("prune_cache", "--unused-for", "0")
    assert not any((tmp_path / "weights").iterdir())
