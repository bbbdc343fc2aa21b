"""`manage.py migrate`: Django's, with a sentence for databases that are too old for it."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError
from django.core.management.commands import migrate
from django.db import connections

from config.squashed import half_way


class Command(migrate.Command):
    """Brings the database's schema up to date."""

    def handle(self, *args: Any, **options: Any) -> None:
        """Refuse a database that stopped in the middle of steps that are one today."""
        if apps := half_way(connections[options["database"]]):
            raise CommandError(
                f"This database is older than this Quire can bring up to date (its {apps[0]} "
                "tables stopped half-way to November 2026). Open it once with a Quire of that "
                "month, then with this one."
            )
        super().handle(*args, **options)
