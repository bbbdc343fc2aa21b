"""`manage.py migrate`: Django's, quick where nothing or everything is to be made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.management.base import CommandError
from django.core.management.commands import migrate
from django.core.management.sql import emit_post_migrate_signal
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from config.fresh_schema import is_current, is_empty, make_tables
from config.squashed import half_way

#: Options that ask for less than all, or for something else.
SPECIAL = (
    "app_label",
    "migration_name",
    "check_unapplied",
    "plan",
    "fake",
    "fake_initial",
    "prune",
)

#: PostgreSQL's advisory lock that a migration holds; "quire" in ASCII.
MIGRATION_LOCK = int.from_bytes(b"quire")


class Command(migrate.Command):
    """Brings the database's schema up to date."""

    def handle(self, *args: Any, **options: Any) -> None:
        """One at a time; who comes second finds everything done."""
        with _migrating(connections[options["database"]]):
            self._bring_up_to_date(*args, **options)

    def _bring_up_to_date(self, *args: Any, **options: Any) -> None:
        """Refuse a database that stopped in the middle of steps that are one today."""
        connection = connections[options["database"]]
        if apps := half_way(connection):
            raise CommandError(
                f"This database is older than this Quire can bring up to date (its {apps[0]} "
                "tables stopped half-way to November 2026). Open it once with a Quire of that "
                "month, then with this one."
            )
        if not any(options.get(name) for name in SPECIAL):
            if is_empty(connection):
                make_tables(connection)
            if is_current(connection):
                # What a killed start left out is made now: rights, guards of the audit log.
                emit_post_migrate_signal(0, options["interactive"], connection.alias)
                if options["verbosity"] >= 1:
                    self.stdout.write("The database is up to date.")
                return
        super().handle(*args, **options)


@contextmanager
def _migrating(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Hold the database's lock for migrations: gateways that start together all migrate.

    SQLite has one writer, and an instance on it one `manage.py up`.
    """
    if connection.vendor != "postgresql":
        yield
        return
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [MIGRATION_LOCK])
    try:
        yield
    finally:
        # A connection that broke has let go of it.
        if connection.is_usable():
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [MIGRATION_LOCK])
