"""Database settings: SQLite in the data dir, or what `DATABASE_URL` says."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dj_database_url
from django.core.exceptions import ImproperlyConfigured

from config.redis_urls import check_address

SCHEMES = ("postgres", "postgresql", "sqlite")

#: Readers never wait for the writer; a writer waits for another instead of failing.
SQLITE_OPTIONS: dict[str, Any] = {
    # A transaction that starts as a reader and turns writer can't wait for the lock in SQLite: it
    # fails at once. Taking the write lock first makes `timeout` hold for every transaction.
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": (
        "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA busy_timeout=20000;"
        "PRAGMA foreign_keys=ON; PRAGMA cache_size=-16000"
    ),
}


def database(url: str, data_dir: Path, *, pool: bool = True) -> dict[str, Any]:
    """Django's settings of one database.

    Args:
        url: `postgres://...`, `sqlite:///...`, or "" for SQLite in `data_dir`.
        pool: keep PostgreSQL connections in a pool. An async request runs its queries in a thread
            of its own, so connections kept by thread would be opened anew for each request.
    Raises: ImproperlyConfigured for other databases, and for what is no address.
    """
    if url and urlsplit(url).scheme not in SCHEMES:
        raise ImproperlyConfigured(
            f"DATABASE_URL must start with postgres:// (or sqlite:///), not {url.split(':')[0]!r}. "
            "Unset, Quire keeps SQLite in its data dir."
        )
    check_address("DATABASE_URL", url)
    settings: dict[str, Any] = dict(
        dj_database_url.parse(url or f"sqlite:///{data_dir / 'quire.sqlite3'}")
    )
    options = dict(settings.get("OPTIONS") or {})
    if settings["ENGINE"].endswith("sqlite3"):
        options = SQLITE_OPTIONS | options
    elif settings["ENGINE"].endswith("postgresql") and pool:
        options.setdefault("pool", {"min_size": 1, "max_size": 20, "timeout": 10})
        # After a restart of the server no request gets a connection that had broken before it.
        settings["CONN_HEALTH_CHECKS"] = True
        _look_each_second()
    return settings | {"OPTIONS": options, "CONN_MAX_AGE": 0}


def _look_each_second() -> None:
    """Have pools try to reach a server that is away once a second.

    By themselves they wait twice as long after each try: a server that was away for 5 s would be
    found after 7 or 15, and one that was away for a minute after two.
    """
    from psycopg_pool.base import AttemptWithBackoff

    AttemptWithBackoff.DELAY_BACKOFF = 1.0
