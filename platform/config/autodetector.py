"""Migrations have what the database knows: a field's words and rules stand in its model alone."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.migrations.autodetector import MigrationAutodetector

#: Arguments of fields that change nothing in the database.
MODEL_ONLY = frozenset({"choices", "error_messages", "help_text", "validators", "verbose_name"})


class DatabaseAutodetector(MigrationAutodetector):
    """Django's, which sees no difference in `MODEL_ONLY`."""

    def deep_deconstruct(self, obj: Any) -> Any:
        """Return the parts of a value to compare."""
        parts = super().deep_deconstruct(obj)
        if not isinstance(obj, models.Field):
            return parts
        path, args, kwargs = parts
        return path, args, {name: kwargs[name] for name in kwargs.keys() - MODEL_ONLY}
