"""Database settings: SQLite in the data dir, or the database of `DATABASE_URL`."""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import dj_database_url

#: The kernel limits a Unix socket's path to 108 bytes with the closing NUL (104 on macOS).
MAX_SOCKET_PATH = 100


def socket_path(data_dir: Path) -> Path:
    """Return the socket path of this data dir's server; in a short folder if the path is long."""
    path = data_dir / "redis" / "redis.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    name = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"quire-{os.getuid()}-{name}" / "redis.sock"


def socket_url(data_dir: Path) -> str:
    """Return the URL of this data dir's embedded Redis, which `manage.py up` starts."""
    return f"unix://{quote(str(socket_path(data_dir)))}"


def celery_url(redis_url: str) -> str:
    """Return the URL as Celery spells it: `redis+socket://` with the database as `virtual_host`."""
    parts = urlsplit(redis_url)
    if parts.scheme != "unix":
        return redis_url
    database = parse_qs(parts.query).get("db", ["0"])[0]
    return f"redis+socket://{parts.path}?virtual_host={database}"


def channel_host(redis_url: str) -> dict[str, Any]:
    """Return Channels' host settings. Publishing a change doesn't wait for an unreachable Redis,
    because a notification isn't worth it; consumers retry their reads each second by themselves.
    """
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    timeouts = {"socket_connect_timeout": 2.0, "socket_timeout": 2.0}
    return {"address": redis_url, **timeouts, "retry": Retry(NoBackoff(), 0)}


#: Readers never wait for the writer, and a writer waits for another one instead of failing.
SQLITE_OPTIONS: dict[str, Any] = {
    # In SQLite a transaction that reads first and then writes can't wait for the lock: it fails at
    # once. Taking the write lock at its start makes `timeout` apply to every transaction.
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": (
        "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA busy_timeout=20000;"
        "PRAGMA foreign_keys=ON; PRAGMA cache_size=-16000"
    ),
}


def database(url: str, data_dir: Path) -> dict[str, Any]:
    """Return Django's settings of one database.

    Args:
        url: `postgres://...?pool_size=20`, `sqlite:///...`, or "" for SQLite in `data_dir`.
            `pool_size` is the maximum number of PostgreSQL connections in a pool. An async request
            runs its queries in a new thread, so per-thread connections would be opened for each
            request.
    """
    settings: dict[str, Any] = dict(
        dj_database_url.parse(url or f"sqlite:///{data_dir / 'quire.sqlite3'}")
    )
    # The same backend with counters of connections, statements and errors for `/metrics`.
    settings["ENGINE"] = settings["ENGINE"].replace("django.", "django_prometheus.", 1)
    options = dict(settings.get("OPTIONS") or {})
    pool_size = options.pop("pool_size", 20)
    if settings["ENGINE"].endswith("sqlite3"):
        options = SQLITE_OPTIONS | options
    elif settings["ENGINE"].endswith("postgresql"):
        options.setdefault("pool", {"min_size": 1, "max_size": pool_size, "timeout": 10})
        # Checked so that no request gets a connection that broke when the server restarted.
        settings["CONN_HEALTH_CHECKS"] = True
        # Behind a PgBouncer in transaction pooling mode they would be on another connection.
        settings["DISABLE_SERVER_SIDE_CURSORS"] = True
        _poll_every_second()
    return settings | {"OPTIONS": options, "CONN_MAX_AGE": 0}


def _poll_every_second() -> None:
    """Make connection pools retry an unreachable server once a second.

    By default the pool doubles its delay after each attempt: it would notice a server that was away
    for 5 s after 7 or 15 s, and one that was away for a minute after two minutes.
    """
    from psycopg_pool.base import AttemptWithBackoff

    AttemptWithBackoff.DELAY_BACKOFF = 1.0
