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
from pydantic import ValidationError

from common.files import make_private, secret_key, write_private
from common.log_context import bind_request, bound_request, detached, request_fields
from common.setting_types import TenantQuotas
from common.settings_environment import INTERNAL, load_settings, variables
from config.connections import MAX_SOCKET_PATH, celery_url, database, socket_path, socket_url
from config.logging import (
    MAX_CHARS,
    build_formatter,
    escape_control_chars,
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- environment ------------------------------------------------------------------------------


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without settings."""
    for name in [*variables(), INTERNAL]:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("TRUE", True), (" yes ", True), ("0", False), ("off", False), (" ", False)],
)
def test_flags(env: pytest.MonkeyPatch, text: str, value: bool) -> None:
    env.setenv("QUIRE_STRICT", text)
    assert load_settings().strict is value


INVALID = {
    "QUIRE_STRICT": ("perhaps", "must be true or false; got 'perhaps'."),
    "QUIRE_DRAIN_SECONDS": ("many", "must be a whole number; got 'many'."),
    "QUIRE_BATCH_CONCURRENCY": ("0", "must be at least 1; got '0'."),
    "QUIRE_AUDIT_DAYS": ("40000", "must be at most 36500; got '40000'."),
    "QUIRE_LOG_STYLE": ("xml", "must be 'line', 'json' or 'debug'; got 'xml'."),
    "QUIRE_CURRENCY": ("dollar", "must be three letters such as usd; got 'dollar'."),
    "QUIRE_ROOT_PATH": ("//x", "must be a path such as /quire; got '//x'."),
    "QUIRE_MAX_BODY_BYTES": (
        "plenty",
        "must be a size in bytes such as 10485760 or 10MiB; got 'plenty'.",
    ),
    "QUIRE_DEFAULT_CHAT_TEMPLATE_KWARGS": ("[]", "must be a JSON object; got '[]'."),
    "QUIRE_EGRESS_NETWORKS": (
        "10.0.0.0/8,10.0.0.1/8",
        "must be IP addresses or networks: 10.0.0.1/8 has host bits set; got '10.0.0.1/8'.",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_a_wrong_value_is_told_with_its_variable_and_what_is_allowed(
    env: pytest.MonkeyPatch, name: str
) -> None:
    value, sentence = INVALID[name]
    env.setenv(name, value)
    with pytest.raises(ImproperlyConfigured) as refused:
        load_settings()
    assert str(refused.value) == f"{name} {sentence}"


def test_all_mistakes_are_told_at_once_in_a_line_each(env: pytest.MonkeyPatch) -> None:
    for name, (value, _) in INVALID.items():
        env.setenv(name, value)
    with pytest.raises(ImproperlyConfigured) as refused:
        load_settings()
    lines = str(refused.value).splitlines()
    assert {line.split()[0] for line in lines} == {*INVALID}
    assert len(lines) == len(INVALID)


@pytest.mark.parametrize("name", ["DATABASE_URL", "REDIS_URL", "QUIRE_SMTP_URL"])
@pytest.mark.parametrize("url", ["//:hush@host", "no://:hush@host", "{}://:hu/hush@host:1"])
def test_a_wrong_address_is_told_without_it(env: pytest.MonkeyPatch, name: str, url: str) -> None:
    scheme = {"DATABASE_URL": "postgres", "REDIS_URL": "redis", "QUIRE_SMTP_URL": "smtp"}[name]
    env.setenv(name, url.format(scheme))
    with pytest.raises(ImproperlyConfigured, match=f"^{name} must ") as refused:
        load_settings()
    assert "hush" not in str(refused.value)


def test_lists_have_no_empty_words_and_an_empty_variable_is_none(env: pytest.MonkeyPatch) -> None:
    env.setenv("QUIRE_ALLOWED_HOSTS", " a, ,b,")
    assert load_settings().allowed_hosts == ("a", "b")
    env.setenv("QUIRE_ALLOWED_HOSTS", " ")
    assert load_settings().allowed_hosts == ("localhost", "127.0.0.1", "[::1]")


def test_sizes_may_have_a_unit(env: pytest.MonkeyPatch) -> None:
    env.setenv("QUIRE_MAX_FILE_BYTES", "3MiB")
    assert load_settings().max_file_bytes == 3 << 20


def test_quotas_are_named_in_one_variable(env: pytest.MonkeyPatch) -> None:
    env.setenv("QUIRE_TENANT_QUOTAS", "file_bytes=1GiB, open_batches=0")
    quotas = load_settings().tenant_quotas
    assert quotas == TenantQuotas(file_bytes=1 << 30, open_batches=0)
    env.setenv("QUIRE_TENANT_QUOTAS", "files=3,running_batches=0")
    with pytest.raises(ImproperlyConfigured) as refused:
        load_settings()
    assert str(refused.value).splitlines() == [
        "QUIRE_TENANT_QUOTAS: running_batches must be at least 1; got '0'.",
        "QUIRE_TENANT_QUOTAS: files is no setting; got '3'.",
    ]


def test_fields_without_a_variable_are_not_read_from_one(env: pytest.MonkeyPatch) -> None:
    env.setenv("QUIRE_FAILOVER_WAIT_S", "1")
    assert load_settings().failover_wait_s == 30


def test_settings_can_be_replaced_and_not_changed(env: pytest.MonkeyPatch) -> None:
    env.setenv("QUIRE_KEY_PREFIX", "blue")
    quire = load_settings()
    assert quire.replace(strict=True).key_prefix == "blue"
    with pytest.raises(ValidationError, match="max_attempts"):
        quire.replace(max_attempts=0)
    with pytest.raises(ValidationError, match="no_such_field"):
        quire.replace(no_such_field=1)
    with pytest.raises(ValidationError, match="frozen"):
        quire.strict = True  # type: ignore[misc]


def test_files_and_adapters_are_in_one_directory(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env.setenv("QUIRE_DATA_DIR", str(tmp_path / "data"))
    assert load_settings().files_dir == tmp_path / "data" / "files"
    env.setenv("QUIRE_STORAGE_DIR", str(tmp_path / "shared"))
    assert load_settings().files_dir == tmp_path / "shared" / "files"
    assert load_settings().adapters_dir == tmp_path / "shared" / "adapters"


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

    def acquire() -> None:
        barrier.wait()
        keys.append(secret_key(tmp_path))

    threads = [threading.Thread(target=acquire) for _ in range(8)]
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
    for formatter in (build_formatter("line"), build_formatter("json")):
        line = logged(formatter, "user said %s", hostile)
        assert len(line.splitlines()) == 1
        assert line.isprintable()
        line.encode("utf-8")


def test_fault_32_a_long_text_is_cut_with_its_length() -> None:
    line = escape_control_chars("x" * 1_000_000)
    assert len(line) < MAX_CHARS + 100
    assert line.endswith("(1000000 characters)")


def test_a_traceback_stays_in_its_record() -> None:
    line = logged(build_formatter("line"), "failed", error=True)
    assert "\n" not in line
    assert "Traceback" in line
    assert r"line one\nline two" in line
    entry = json.loads(logged(build_formatter("json"), "failed", error=True))
    assert entry["message"] == "failed"
    assert "ValueError" in entry["exception"]


def test_people_at_a_terminal_see_tracebacks_as_they_are() -> None:
    assert "\nValueError: line one" in logged(build_formatter("debug"), "failed", error=True)


def test_a_line_names_the_request_its_tenant_and_model() -> None:
    with bound_request(request_id="req-1", tenant="acme", model=""):
        bind_request(model="m")
        line, entry = logged(build_formatter("line"), "hello"), logged(build_formatter("json"), "x")
    assert line.endswith(" quire.x: hello [request_id=req-1 tenant=acme model=m]")
    payload = json.loads(entry)
    assert (payload["request_id"], payload["tenant"], payload["model"]) == ("req-1", "acme", "m")
    assert "req-1" not in logged(build_formatter("line"), "hello")


def test_fault_32_a_model_that_a_client_named_is_escaped_as_well() -> None:
    with bound_request(model="m\n2026 INFO forged: sk-quire-abcdefghij" + "s" * 20):
        for style in ("line", "json", "debug"):
            line = logged(build_formatter(style), "hello")
            assert len(line.splitlines()) == 1
            assert "ssss" not in line


def test_a_task_that_serves_all_requests_names_none_of_them() -> None:
    with bound_request(request_id="req-1"):
        with detached():
            assert request_fields() == {}
        assert request_fields() == {"request_id": "req-1"}


def test_a_line_starts_with_time_level_and_logger() -> None:
    line = logged(build_formatter("line"), "hello")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO quire\.x: hello", line)


# -- database and Redis -----------------------------------------------------------------------


def test_sqlite_is_the_default_in_wal_mode_with_write_locks_first(tmp_path: Path) -> None:
    settings_of_database = database("", tmp_path)
    assert settings_of_database["NAME"] == str(tmp_path / "quire.sqlite3")
    assert settings_of_database["OPTIONS"]["transaction_mode"] == "IMMEDIATE"
    assert "journal_mode=WAL" in settings_of_database["OPTIONS"]["init_command"]
    assert "busy_timeout" in settings_of_database["OPTIONS"]["init_command"]


def test_postgresql_comes_from_its_url_with_a_pool(tmp_path: Path) -> None:
    settings_of_database = database(
        "postgres://user:p%40ss@db.example:5433/quire?sslmode=require", tmp_path
    )
    assert settings_of_database["ENGINE"] == "django_prometheus.db.backends.postgresql"
    assert (
        settings_of_database["HOST"],
        settings_of_database["PORT"],
        settings_of_database["NAME"],
    ) == ("db.example", 5433, "quire")
    assert settings_of_database["PASSWORD"] == "p@ss"
    assert settings_of_database["OPTIONS"]["sslmode"] == "require"
    assert settings_of_database["OPTIONS"]["pool"]["max_size"] == 20
    assert settings_of_database["CONN_MAX_AGE"] == 0


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
