from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from adapters import actions
from adapters.cli import add_adapter_arguments, find_adapter
from common.commands import QuireCommand
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = "Unpin an adapter: replicas may unload it when other adapters need the memory."

    def add_arguments(self, parser: CommandParser) -> None:
        add_adapter_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        adapter = find_adapter(options["name"], options["tenant"])
        actions.unpin(actor=CLI_ACTOR, adapter=adapter)
        self.stdout.write(f"{adapter} isn't pinned any more.")
