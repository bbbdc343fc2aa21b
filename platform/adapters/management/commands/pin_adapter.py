from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from adapters import actions
from adapters.cli import add_adapter_arguments, find_adapter
from common.commands import QuireCommand
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = "Keep an adapter's live versions in the memory of every replica of its model."

    def add_arguments(self, parser: CommandParser) -> None:
        add_adapter_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        adapter = find_adapter(options["name"], options["tenant"])
        actions.pin(actor=CLI_ACTOR, adapter=adapter)
        self.stdout.write(f"{adapter} is pinned: replicas load it within seconds and keep it.")
