"""What a newcomer reads who set something wrong: what it is, why, and what to do."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError
from django.db import OperationalError

from common.commands import raise_database_error
from common.files import make_private
from common.settings_environment import check_variables, load_settings, unknown_variables
from config.logging import SettingNameFilter
from tests.platform.instance import ROOT, environment


def test_a_data_dir_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ImproperlyConfigured, match=r"file can't be made: File exists.*--data-dir"):
        make_private(tmp_path / "file")


def test_a_data_dir_of_somebody_else_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ImproperlyConfigured, match="Change its owner, or name another"):
        make_private(tmp_path)


@pytest.mark.parametrize("url", ["nonsense", "mysql://u:secret@host/name", "http://host"])
def test_other_databases_are_refused_without_their_passwords(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", url)
    with pytest.raises(ImproperlyConfigured, match="DATABASE_URL must start with") as refused:
        load_settings()
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["localhost:6379", "http://host", "//host"])
def test_what_is_no_address_of_a_redis_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", url)
    with pytest.raises(ImproperlyConfigured, match="REDIS_URL must start with redis://"):
        load_settings()


def test_a_slip_in_a_variables_name_is_told_with_the_name_that_was_meant() -> None:
    environment = {
        "QUIRE_MAX_BODY_BYTE": "5",
        "QUIRE_NONSENSE": "1",
        "QUIRE_LOG_LEVEL": "INFO",
        "QUIRE_CACHE_DIR": "/x",
        "QUIRE_TEST_REQUIRE_SERVICES": "1",
        "PATH": "/bin",
    }
    assert unknown_variables(environment) == [
        "QUIRE_MAX_BODY_BYTE is no setting and changes nothing. Did you mean QUIRE_MAX_BODY_BYTES?",
        "QUIRE_NONSENSE is no setting and changes nothing.",
    ]


@pytest.mark.system
def test_commands_say_that_a_variable_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_ALOWED_HOSTS", "quire.example")
    done = subprocess.run(
        [sys.executable, "manage.py", "list_settings"],
        cwd=ROOT,
        env=environment(tmp_path) | {"QUIRE_ALOWED_HOSTS": "quire.example"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Did you mean QUIRE_ALLOWED_HOSTS?" in done.stdout + done.stderr
    assert check_variables in checks.registry.registry.get_checks()  # of `manage.py check`
    assert "Did you mean QUIRE_ALLOWED_HOSTS?" in str(check_variables())


def test_a_refused_host_is_logged_with_our_variable() -> None:
    record = logging.LogRecord(
        "x", 40, "", 0, "You may need to add 'a' to ALLOWED_HOSTS.", (), None
    )
    assert SettingNameFilter().filter(record)
    assert record.getMessage() == "You may need to add 'a' to QUIRE_ALLOWED_HOSTS."


def test_sentinels_are_refused_with_what_to_name_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis+sentinel://:secret@a:26379,b:26379/mymaster/0")
    with pytest.raises(ImproperlyConfigured, match="Sentinels aren't asked") as refused:
        load_settings()
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["redis://h", "rediss://:p@h:1/2", "unix:///run/redis.sock"])
def test_addresses_of_a_redis_stay_as_they_are(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", url)
    assert load_settings().redis_url == url


def test_a_database_that_is_away_is_told_with_where_to_look() -> None:
    with pytest.raises(CommandError, match=r"can't be used: gone.*DATABASE_URL"):
        raise_database_error(OperationalError("gone"))


def test_fault_30_a_full_disk_is_told_as_one() -> None:
    with pytest.raises(CommandError, match=r"is full: make room there\.$"):
        raise_database_error(OperationalError("database or disk is full"))


@pytest.mark.system
def test_wrong_settings_end_a_command_with_a_line_for_each(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "list_models"],
        cwd=ROOT,
        env=environment(tmp_path, QUIRE_MAX_BODY_BYTES="plenty", QUIRE_TLS="maybe"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "Quire's settings: QUIRE_TLS must be 'off', 'proxy' or 'direct'; got 'maybe'.",
        "QUIRE_MAX_BODY_BYTES must be a size in bytes such as 10485760 or 10MiB; got 'plenty'.",
    ]


@pytest.mark.system
@pytest.mark.parametrize("command", ["list_keys", "up"])
def test_a_postgresql_that_is_away_ends_a_command_at_once_with_its_reason(
    command: str, tmp_path: Path
) -> None:
    pytest.importorskip("psycopg")
    done = subprocess.run(
        [sys.executable, "manage.py", command],
        cwd=ROOT,
        env=environment(tmp_path, DATABASE_URL="postgres://u:geheim@127.0.0.1:1/x"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "x at 127.0.0.1:1 can't be used: " in done.stderr
    assert "Connection refused" in done.stderr
    assert "geheim" not in done.stderr
