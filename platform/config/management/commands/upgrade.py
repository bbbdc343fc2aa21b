"""`manage.py upgrade`."""

from __future__ import annotations

from typing import Any

import redis
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError, CommandParser
from django.db import connection
from django.db.migrations import Migration
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.operations import (
    AddField,
    AlterField,
    DeleteModel,
    RemoveField,
    RenameField,
    RenameModel,
)
from django.db.models import Field

from catalog.heartbeats import read_heartbeats, registered_replicas
from common.commands import QuireCommand, as_sentence
from common.settings import unknown_variables
from engine.contract.message_version import MESSAGE_VERSION, is_compatible
from engine.system.redis_client import sync_client

#: What the release before may still use: it has to be stopped first.
_BREAKING = (AlterField, DeleteModel, RemoveField, RenameField, RenameModel)


class Command(QuireCommand):
    """Migrate the database, or say what an upgrade would do."""

    help = (
        "Update the database for this release; --check only says what would be done: migrations, "
        "running replicas whose messages this release can't read, and variables that are no "
        "settings any more. Exits with 1 if processes of the old release must be stopped first."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--check", action="store_true", help="change nothing")

    def handle(self, *args: Any, **options: Any) -> None:
        """Print what it does; raise `CommandError` where the old release can't run beside it."""
        migrations, replicas = self._migrations(), self._messages()
        variables = unknown_variables()
        for sentence in variables or ["Configuration: every variable is a setting."]:
            self.stdout.write(sentence)
        for sentence in [*migrations, *replicas]:
            self.stdout.write(sentence)
        # Nobody can see whether gateways have been stopped: who doesn't ask by --check migrates.
        if replicas or (migrations and options["check"]):
            raise CommandError("Stop gateways, workers and replicas of the old release first.")
        if not migrations:
            self.stdout.write("The old release can run until its processes are replaced.")
        if not options["check"]:
            call_command("migrate", interactive=False, stdout=self.stdout)

    def _migrations(self) -> list[str]:
        """Print the migrations; return those that the old release can't run with."""
        executor = MigrationExecutor(connection)
        plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
        if not executor.loader.applied_migrations:
            self.stdout.write("Database: it's empty; all tables are created.")
            return []
        if not plan:
            self.stdout.write("Database: no migrations.")
        for migration, _ in plan:
            self.stdout.write(f"Database: {migration}")
        return [
            f"{migration} changes what the old release uses."
            for migration, _ in plan
            if is_breaking(migration)
        ]

    def _messages(self) -> list[str]:
        """Print the version of messages; return the replicas that can't be talked to."""
        self.stdout.write(f"Messages: version {MESSAGE_VERSION}.")
        prefix = settings.QUIRE.key_prefix
        try:
            client = sync_client(settings.REDIS_URL)
            beats = read_heartbeats(client, prefix, sorted(registered_replicas(client, prefix)))
        except (redis.RedisError, OSError) as error:
            raise CommandError(f"Replicas can't be seen: {as_sentence(error)}") from error
        return [
            f"Replica {beat.replica_id} has messages of version {beat.message_version}."
            for beat in beats.values()
            if not is_compatible(beat.message_version)
        ]


def is_breaking(migration: Migration) -> bool:
    """Whether it removes or changes what is there, instead of only adding to it; or adds a column
    that rows of the old release lack a value for.
    """
    return any(
        isinstance(operation, _BREAKING)
        or (isinstance(operation, AddField) and _needs_value(operation.field))
        for operation in migration.operations
    )


def _needs_value(field: Field[Any, Any]) -> bool:
    # Django's own `default` isn't the database's.
    return not (field.many_to_many or field.null or field.has_db_default())
