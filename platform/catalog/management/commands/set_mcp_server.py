from argparse import BooleanOptionalAction
from typing import Any

from django.core.management.base import CommandParser

from catalog.mcp_servers import FIELDS, check_mcp_server, set_mcp_server
from common.commands import QuireCommand
from tenants.actors import CLI_ACTOR
from tenants.cli import find_tenant


class Command(QuireCommand):
    help = (
        "Add an MCP server, or change it, and list its tools, which then run in the playground "
        "as they are now. Private addresses need QUIRE_EGRESS_NETWORKS."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="name that its tools' names begin with")
        parser.add_argument("--url", help=FIELDS["url"])
        parser.add_argument("--authorization", metavar="VALUE", help=FIELDS["authorization"])
        parser.add_argument("--public", action=BooleanOptionalAction, help=FIELDS["public"])
        parser.add_argument(
            "--tenant",
            action="append",
            metavar="NAME",
            help="tenant that may use it, if not every tenant may; repeatable",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        slugs = options["tenant"]
        server = set_mcp_server(
            actor=CLI_ACTOR,
            name=options["name"],
            url=options["url"],
            authorization=options["authorization"],
            public=options["public"],
            tenants=None if slugs is None else [find_tenant(slug) for slug in slugs],
        )
        tools = check_mcp_server(actor=CLI_ACTOR, server=server).tools
        names = ", ".join(tool["name"] for tool in tools) or "none"
        self.stdout.write(f"{server} is set. Tools: {names}.")
