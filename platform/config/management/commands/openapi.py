from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from inference.openapi import generate


class Command(QuireCommand):
    needs_database = False
    help = "Generate the OpenAPI document of the API, as /openapi.json serves it."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "-o", "--output", metavar="FILE", help="where to write it (default: standard output)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Write JSON in the order of the schema: an unchanged schema gives the same text."""
        text = json.dumps(generate(), indent=1, ensure_ascii=False) + "\n"
        if options["output"]:
            Path(options["output"]).write_text(text, encoding="utf-8")
        else:
            self.stdout.write(text, ending="")
