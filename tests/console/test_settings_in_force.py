"""Settings in force: all of them, with where they came from, and never a secret."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.effective_settings import in_force
from common.redaction import without_credentials
from common.settings import QuireSettings, is_secret, variable_of
from common.settings_environment import variables
from tests.console.conftest import Login

ROOT = Path(__file__).resolve().parents[2]
NAMES = {*variables()}
FIELDS = QuireSettings.model_fields
SECRETS = {variable_of(name) for name, field in FIELDS.items() if is_secret(field)}


def test_every_setting_has_a_group_a_description_and_one_variable() -> None:
    settings = in_force()
    assert len({setting.name for setting in settings}) == len(settings)
    assert all(setting.group and setting.help.endswith(".") for setting in settings)
    assert {setting.name for setting in settings} >= NAMES
    assert {"QUIRE_SECRET_KEY", "QUIRE_API_KEYS", "QUIRE_METRICS_TOKEN"} <= SECRETS


@pytest.mark.system
def test_values_come_with_where_they_came_from(tmp_path: Path) -> None:
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")},
        "DATABASE_URL": "",
        "QUIRE_AUDIT_DAYS": "7",
        "QUIRE_METRICS_TOKEN": "hush-hush-token",
        "QUIRE_API_KEYS": "hush-hush-key-hush-hush",
        "QUIRE_SECRET_KEY": "hush-hush-secret",
        "QUIRE_SMTP_URL": "smtp://me:hush-hush@mail.example:25?password=hush-hush",
        "QUIRE_MAIL_FROM": "me@example.org",
        "REDIS_URL": "redis://:hush-hush@127.0.0.1:1/0?password=hush-hush",
    }
    command = [sys.executable, "manage.py", "list_settings", "--all", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert "hush" not in done.stdout
    assert re.search(r"7 +environment$", rows["QUIRE_AUDIT_DAYS"])
    assert re.search(rf"{tmp_path} +flag$", rows["QUIRE_DATA_DIR"])
    assert re.search(r"set +environment$", rows["QUIRE_SECRET_KEY"])
    assert re.search(r"set +environment$", rows["QUIRE_API_KEYS"])
    assert re.search(r"smtp://mail.example:25 +environment$", rows["QUIRE_SMTP_URL"])
    assert re.search(r"200 MiB\) +default$", rows["QUIRE_MAX_FILE_BYTES"])
    assert re.search(r"30.0 +default$", rows["QUIRE.failover_wait_s"])


@pytest.mark.parametrize("name", ["ada", "olga", "nobody"])
def test_only_operators_see_them(login: Login, name: str) -> None:
    client = login(name)
    assert client.get("/console/settings/").status_code == 403
    assert client.get("/api/settings/").status_code == 403
    assert "/console/settings/" not in client.get("/console/").content.decode()


def test_no_secret_reaches_a_browser(
    login: Login, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    for secret in SECRETS:
        monkeypatch.setenv(secret, "hush-hush-hush-hush")
    monkeypatch.setenv("QUIRE_OBJECT_STORAGE", '{"BACKEND": "hush"}')
    monkeypatch.setenv("DATABASE_URL", "postgres://me:hush-hush@db/quire")
    settings.QUIRE = QuireSettings()
    root = login("root")
    for path in ("/console/settings/", "/api/settings/"):
        answer = root.get(path)
        assert answer.status_code == 200
        assert "hush" not in answer.content.decode()
    settings_by_name = {setting["name"]: setting for setting in root.get("/api/settings/").json()}
    assert {name for name, setting in settings_by_name.items() if setting["secret"]} == SECRETS
    assert {settings_by_name[name]["value"] for name in SECRETS} == {"set"}
    assert {path.name for path in in_force()} >= NAMES


def test_an_address_is_shown_without_what_lets_one_in() -> None:
    address = "postgres://u:p@host:5/name?password=x#y"
    assert without_credentials(address) == "postgres://host:5/name"
    assert without_credentials("unix:///run/redis.sock?db=1") == "unix:///run/redis.sock"
    assert "hush" not in without_credentials("http://[hush")
