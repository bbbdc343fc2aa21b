from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from adapters import access, actions
from adapters.cli import add_adapter_arguments, find_adapter
from common.commands import QuireCommand
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = "End an adapter's canary; without one, return to the previous version."

    def add_arguments(self, parser: CommandParser) -> None:
        add_adapter_arguments(parser)
        parser.add_argument(
            "--alias",
            default="",
            metavar="NAME",
            help="name that requests use (default: the adapter's own)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        adapter = find_adapter(options["name"], options["tenant"])
        alias = access.access_alias(CLI_ACTOR, adapter, options["alias"])
        updated = actions.rollback(actor=CLI_ACTOR, alias=alias)
        number = updated.version.number if updated.version is not None else "-"
        self.stdout.write(f"{updated}: version {number} answers all requests.")
