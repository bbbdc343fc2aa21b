"""`manage.py arguments`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import CommandParser

from config.arguments_page import page
from tenants.commands import QuireCommand


class Command(QuireCommand):
    """Write the page about arguments."""

    needs_database = False
    help = "Write docs/arguments.md: each argument and variable of vLLM with its counterpart."

    def add_arguments(self, parser: CommandParser) -> None:
        """Where to."""
        parser.add_argument("-o", "--output", metavar="FILE", help="(default: standard output)")

    def handle(self, *args: Any, **options: Any) -> None:
        """Markdown."""
        text = page()
        if options["output"]:
            Path(options["output"]).write_text(text, encoding="utf-8")
        else:
            self.stdout.write(text, ending="")
