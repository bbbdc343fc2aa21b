from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from adapters import access, actions
from adapters.cli import add_adapter_arguments, find_adapter
from common.commands import QuireCommand
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = "Promote a version of an adapter to live, or to a canary with a share of the requests."

    def add_arguments(self, parser: CommandParser) -> None:
        add_adapter_arguments(parser)
        parser.add_argument(
            "version",
            type=int,
            nargs="?",
            help="version number (default: the latest valid version)",
        )
        parser.add_argument(
            "--alias",
            default="",
            metavar="NAME",
            help="name that requests use (default: the adapter's own)",
        )
        parser.add_argument(
            "--percent",
            type=int,
            default=100,
            metavar="N",
            help="percent of the requests; below 100 it is a canary (default: 100)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        adapter, number = find_adapter(options["name"], options["tenant"]), options["version"]
        if number is None:
            version = actions.latest_valid_version(adapter)
            if version is None:
                raise actions.no_valid_version_error(adapter)
        else:
            version = access.access_version(CLI_ACTOR, adapter, number)
        alias = actions.promote(
            actor=CLI_ACTOR,
            version=version,
            alias=options["alias"],
            percent=options["percent"],
        )
        self.stdout.write(f"{alias}: version {version.number}, {options['percent']} %.")
