"""Environment, data dir, logging, database and Redis settings."""

import json
import logging
import os
import re
import stat
import sys
import threading
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from common import settings as environment
from common.files import make_private, secret_key, write_private
from config.connections import MAX_SOCKET_PATH, celery_url, database, socket_path, socket_url
from config.logging import (
    MAX_CHARS,
    DebugFormatter,
    JsonFormatter,
    LineFormatter,
    escape_control_chars,
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- environment ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("TRUE", True), (" yes ", True), ("0", False), ("", False)]
)
def test_flags(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("QUIRE_X", text)
    assert environment.flag("QUIRE_X") is value


def test_bad_values_name_their_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_X", "perhaps")
    for read in (
        lambda: environment.flag("QUIRE_X"),
        lambda: environment.integer("QUIRE_X", 1),
        lambda: environment.choice("QUIRE_X", "a", ("a", "b")),
    ):
        with pytest.raises(ImproperlyConfigured, match="QUIRE_X"):
            read()


def test_integers_keep_to_their_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_X", "5")
    assert environment.integer("QUIRE_X", 1, low=5, high=5) == 5
    with pytest.raises(ImproperlyConfigured, match=r"\[6, 9\]"):
        environment.integer("QUIRE_X", 7, low=6, high=9)
    monkeypatch.delenv("QUIRE_X")
    assert environment.integer("QUIRE_X", 7) == 7


def test_lists_have_no_empty_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_X", " a, ,b,")
    assert environment.words("QUIRE_X", []) == ["a", "b"]
    monkeypatch.delenv("QUIRE_X")
    assert environment.words("QUIRE_X", ["z"]) == ["z"]


# -- data dir ---------------------------------------------------------------------------------


def test_the_secret_key_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    data_dir = tmp_path / "deep" / "data"
    first = secret_key(data_dir)
    assert secret_key(data_dir) == first
    assert len(first) >= 50
    assert mode(data_dir) == 0o700
    assert mode(data_dir / "secret_key") == 0o600
    assert secret_key(tmp_path / "other") != first


def test_threads_that_race_for_the_secret_key_get_the_same_one(tmp_path: Path) -> None:
    keys: list[str] = []
    barrier = threading.Barrier(8)

    def take() -> None:
        barrier.wait()
        keys.append(secret_key(tmp_path))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(keys)) == 1
    assert os.listdir(tmp_path) == ["secret_key"]


def test_a_private_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_private(tmp_path) / "ready.json"
    write_private(path, "one")
    assert (path.read_text(), mode(path)) == ("one", 0o600)

    def full(fd: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_private(path, "two")
    assert path.read_text() == "one"
    assert os.listdir(tmp_path) == ["ready.json"]


# -- logging ----------------------------------------------------------------------------------


def logged(formatter: logging.Formatter, message: str, *args: object, error: bool = False) -> str:
    info = None
    if error:
        try:
            raise ValueError("line one\nline two")
        except ValueError:
            info = sys.exc_info()
    record = logging.LogRecord("quire.x", logging.INFO, "f", 1, message, args, info)
    return formatter.format(record)


@pytest.mark.parametrize(
    "hostile",
    [
        "a\nb",
        "a\r\nINFO forged: all is well",
        "a\x1b[2Jb",
        "a\x00b",
        "a\u2028b",
        "a\u202eb",
        "a\x85b",
        "a\ud800b",
    ],
)
def test_fault_32_a_record_is_one_line_whatever_is_in_it(hostile: str) -> None:
    for formatter in (LineFormatter(), JsonFormatter()):
        line = logged(formatter, "user said %s", hostile)
        assert len(line.splitlines()) == 1
        assert line.isprintable()
        line.encode("utf-8")


def test_fault_32_a_long_text_is_cut_with_its_length() -> None:
    line = escape_control_chars("x" * 1_000_000)
    assert len(line) < MAX_CHARS + 100
    assert line.endswith("(1000000 characters)")


def test_a_traceback_stays_in_its_record() -> None:
    line = logged(LineFormatter(), "failed", error=True)
    assert "\n" not in line
    assert "Traceback" in line
    assert r"line one\nline two" in line
    entry = json.loads(logged(JsonFormatter(), "failed", error=True))
    assert entry["message"] == "failed"
    assert "ValueError" in entry["exception"]


def test_people_at_a_terminal_see_tracebacks_as_they_are() -> None:
    assert "\nValueError: line one" in logged(DebugFormatter(), "failed", error=True)


def test_a_line_starts_with_time_level_and_logger() -> None:
    line = logged(LineFormatter(), "hello")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO quire\.x: hello", line)


# -- database and Redis -----------------------------------------------------------------------


def test_sqlite_is_the_default_in_wal_mode_with_write_locks_first(tmp_path: Path) -> None:
    found = database("", tmp_path)
    assert found["NAME"] == str(tmp_path / "quire.sqlite3")
    assert found["OPTIONS"]["transaction_mode"] == "IMMEDIATE"
    assert "journal_mode=WAL" in found["OPTIONS"]["init_command"]
    assert "busy_timeout" in found["OPTIONS"]["init_command"]


def test_postgresql_comes_from_its_url_with_a_pool(tmp_path: Path) -> None:
    found = database("postgres://user:p%40ss@db.example:5433/quire?sslmode=require", tmp_path)
    assert found["ENGINE"] == "django_prometheus.db.backends.postgresql"
    assert (found["HOST"], found["PORT"], found["NAME"]) == ("db.example", 5433, "quire")
    assert found["PASSWORD"] == "p@ss"
    assert found["OPTIONS"]["sslmode"] == "require"
    assert found["OPTIONS"]["pool"]["max_size"] == 20
    assert found["CONN_MAX_AGE"] == 0


def test_a_socket_lies_in_the_data_dir_or_in_a_short_folder_when_that_is_long(
    tmp_path: Path,
) -> None:
    short, long = Path("/data"), Path("/data") / ("x" * 120)
    assert socket_path(short) == Path("/data/redis/redis.sock")
    assert len(str(socket_path(long))) <= MAX_SOCKET_PATH
    assert socket_path(long) != socket_path(Path(f"{long}y"))
    assert socket_path(long).parent.name.startswith(f"quire-{os.getuid()}-")


def test_celery_gets_its_own_spelling_of_a_socket() -> None:
    assert celery_url("redis://h:1/2") == "redis://h:1/2"
    assert celery_url("unix:///run/r.sock?db=3") == "redis+socket:///run/r.sock?virtual_host=3"
    assert celery_url(socket_url(Path("/d"))) == (
        "redis+socket:///d/redis/redis.sock?virtual_host=0"
    )
