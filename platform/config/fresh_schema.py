"""A first start's tables, made as they are today: all steps of the past take seconds of a core."""

from __future__ import annotations

from django.apps import apps
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder


def is_empty(connection: BaseDatabaseWrapper) -> bool:
    """Whether this is a database of our own, SQLite, without a table."""
    return connection.vendor == "sqlite" and not connection.introspection.table_names()


def make_tables(connection: BaseDatabaseWrapper) -> None:
    """All tables of all models, and the note that every migration has been applied; or nothing.

    A test holds them against what the migrations make.
    """
    nodes = MigrationLoader(connection).graph.nodes
    recorder = MigrationRecorder(connection)
    with connection.schema_editor() as editor:
        for model in (recorder.Migration, *apps.get_models()):
            if model._meta.can_migrate(connection):
                editor.create_model(model)
        done = {*nodes, *(step for node in nodes.values() for step in node.replaces)}
        rows = [recorder.Migration(app=app, name=name) for app, name in sorted(done)]
        recorder.migration_qs.bulk_create(rows)


def is_current(connection: BaseDatabaseWrapper) -> bool:
    """Whether there is no step left to apply. Django's command asks that of models of two states,
    each of which takes half a second to build.
    """
    executor = MigrationExecutor(connection)
    executor.loader.check_consistent_history(connection)
    if executor.loader.detect_conflicts() or executor.migration_plan(
        executor.loader.graph.leaf_nodes()
    ):
        return False
    executor.check_replacements()
    return True
