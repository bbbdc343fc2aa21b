"""`manage.py arguments`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from tools.docs.arguments_page import page
from tools.docs.inventory_page import inventory


class Command(QuireCommand):
    """Write the pages about vLLM's arguments, and about its fields, routes and metrics."""

    needs_database = False
    help = "Write docs/arguments.md: each argument and variable of vLLM with its counterpart."

    def add_arguments(self, parser: CommandParser) -> None:
        """What, and where to."""
        parser.add_argument(
            "--inventory",
            action="store_true",
            help="docs/inventory.md instead: request fields, routes and metrics",
        )
        parser.add_argument("-o", "--output", metavar="FILE", help="(default: standard output)")

    def handle(self, *args: Any, **options: Any) -> None:
        """Markdown."""
        text = inventory() if options["inventory"] else page()
        if options["output"]:
            Path(options["output"]).write_text(text, encoding="utf-8")
        else:
            self.stdout.write(text, ending="")
