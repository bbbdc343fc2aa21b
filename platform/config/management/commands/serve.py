"""`quire serve MODEL`, which is `manage.py up --model MODEL`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from common.installation import PROGRAM
from config.management.commands import up


class Command(up.Command):
    may_serve_without_key = True
    help = (
        f"Serve a model, as `{PROGRAM} up --model MODEL` does, with vLLM's command line. Without "
        "--api-key, requests from this machine need no API key while there is one user."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.usage = "%(prog)s [MODEL] [--port N] [engine settings]"
        parser.add_argument(
            "model_tag", nargs="?", metavar="MODEL", help="folder, GGUF file or hub id to serve"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Add the model as a positional argument or as --model."""
        tag = options.pop("model_tag")
        if tag and options["model"] not in (None, tag):
            raise CommandError("The model is given twice, first and with --model.")
        options["model"] = tag or options["model"]
        super().handle(*args, **options)
