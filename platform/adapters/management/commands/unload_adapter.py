from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from adapters import actions
from adapters.cli import add_adapter_arguments, find_adapter
from adapters.models import VersionState
from common.commands import QuireCommand
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = (
        "Take an adapter offline: requests for its names are rejected. A rollback brings it back."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        add_adapter_arguments(parser)
        parser.add_argument("--delete", action="store_true", help="remove it and its versions")

    def handle(self, *args: Any, **options: Any) -> None:
        adapter = find_adapter(options["name"], options["tenant"])
        live = adapter.versions.filter(state=VersionState.LIVE).exists()
        if live or not options["delete"]:
            actions.take_offline(actor=CLI_ACTOR, adapter=adapter)
        if options["delete"]:
            actions.delete_adapter(actor=CLI_ACTOR, adapter=adapter)
        self.stdout.write(f"{adapter} is {'deleted' if options['delete'] else 'offline'}.")
