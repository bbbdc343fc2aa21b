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
from common.settings_environment import unknown_variables
from engine.contract.message_version import MESSAGE_VERSION, is_compatible
from engine.system.redis_client import sync_client

#: Operations on tables or columns that the previous release may still use: stop it first.
_BREAKING = (AlterField, DeleteModel, RemoveField, RenameField, RenameModel)


class Command(QuireCommand):
    help = (
        "Update the database for this release; --check only says what would be done: migrations, "
        "running replicas whose messages this release can't read, and variables that are no "
        "settings any more. Exits with 1 if processes of the old release must be stopped first."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--check", action="store_true", help="change nothing")

    def handle(self, *args: Any, **options: Any) -> None:
        """Print the steps; raise `CommandError` if the old release can't run at the same time."""
        migrations, replicas = self._migrations(), self._messages()
        variables = unknown_variables()
        for sentence in variables or ["Configuration: every variable is a setting."]:
            self.stdout.write(sentence)
        for sentence in [*migrations, *replicas]:
            self.stdout.write(sentence)
        # Nothing shows whether gateways were stopped, so without --check migrations are applied.
        if replicas or (migrations and options["check"]):
            raise CommandError("Stop gateways, workers and replicas of the old release first.")
        if not migrations:
            self.stdout.write("The old release can run until its processes are replaced.")
        if not options["check"]:
            call_command("migrate", interactive=False, stdout=self.stdout)

    def _migrations(self) -> list[str]:
        """Print the migrations; return those that the old release isn't compatible with."""
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
        """Print the message version; return the replicas with an incompatible version."""
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
    """Return whether a migration removes or changes columns or tables, or adds a column that the
    old release's INSERT statements lack a value for.
    """
    return any(
        isinstance(operation, _BREAKING)
        or (isinstance(operation, AddField) and _needs_value(operation.field))
        for operation in migration.operations
    )


def _needs_value(field: Field[Any, Any]) -> bool:
    # Django's `default` isn't a default in the database.
    return not (field.many_to_many or field.null or field.has_db_default())
