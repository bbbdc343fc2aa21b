"""`manage.py migrate`: Django's command, run by one process at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.management.commands import migrate
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from config.autodetector import DatabaseAutodetector

#: Key of PostgreSQL's advisory lock; "quire" in ASCII.
MIGRATION_LOCK = int.from_bytes(b"quire")
#: The lock's transaction waits while idle: limits that an operator set for all connections would
#: end it and release the lock. PostgreSQL before 17 lacks the last one.
_WITHOUT_TIMEOUTS = """
    SELECT set_config(name, '0', true) FROM pg_settings WHERE name IN (
        'statement_timeout', 'lock_timeout', 'idle_in_transaction_session_timeout',
        'transaction_timeout'
    )
"""


class Command(migrate.Command):
    autodetector = DatabaseAutodetector

    def handle(self, *args: Any, **options: Any) -> None:
        """Migrate under a lock. Gateways that start together all migrate: later ones wait, and then
        have nothing to do.
        """
        with _migration_lock(connections[options["database"]]):
            super().handle(*args, **options)


@contextmanager
def _migration_lock(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Hold the lock in a transaction of a separate connection: a PgBouncer in transaction pooling
    mode would hand a session-level lock to the connection's next client.

    SQLite needs no lock: only one `manage.py up` runs on a data directory.
    """
    if connection.vendor != "postgresql":
        yield
        return
    import psycopg

    with psycopg.connect(**connection.get_connection_params()) as lock:
        lock.execute(_WITHOUT_TIMEOUTS)
        lock.execute("SELECT pg_advisory_xact_lock(%s)", [MIGRATION_LOCK])
        yield
