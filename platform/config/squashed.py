"""Which steps of the schema became one, and databases that stopped between them."""

from __future__ import annotations

import importlib
import pkgutil

from django.apps import apps
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.recorder import MigrationRecorder


def half_way(connection: BaseDatabaseWrapper) -> list[str]:
    """Apps of which a database has some steps, but neither the one of today nor all before it.

    Django would say that a node is missing, or make tables that are there, and not what to do.
    """
    applied = set(MigrationRecorder(connection).applied_migrations())
    begun = {app for app, _ in applied}
    return [
        app
        for app in ("tenants", "catalog", "metering", "storage")
        for name, replaced in _squashed(app)
        if app in begun and (app, name) not in applied and not set(replaced) <= applied
    ]


def _squashed(app: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """An app's steps that stand for several: their name, and what they stand for."""
    package = importlib.import_module(f"{apps.get_app_config(app).name}.migrations")
    names = [found.name for found in pkgutil.iter_modules(package.__path__)]
    steps = [
        (name, importlib.import_module(f"{package.__name__}.{name}").Migration) for name in names
    ]
    return [(name, list(step.replaces)) for name, step in steps if step.replaces]
