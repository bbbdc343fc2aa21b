from __future__ import annotations

import re
from typing import Any

from django.core.management.base import CommandError, CommandParser

from adapters import store
from common.commands import QuireCommand


class Command(QuireCommand):
    needs_database = False
    help = (
        "Print the path of an adapter's files on this machine, downloaded from the object storage "
        "if they aren't here. Replicas run it before they load an adapter."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("digest", help="sha256 of the adapter's content")

    def handle(self, *args: Any, **options: Any) -> None:
        if not re.fullmatch("[0-9a-f]{64}", options["digest"]):
            raise CommandError("The digest must be 64 hex digits.")
        try:
            self.stdout.write(str(store.fetch_content(options["digest"])))
        except OSError as error:
            raise CommandError(str(error)) from error
