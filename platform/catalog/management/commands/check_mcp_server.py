from typing import Any

from django.core.management.base import CommandParser

from catalog.mcp_servers import access_mcp_server, check_mcp_server
from common.commands import QuireCommand
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = "List the tools of an MCP server, which then run in the playground as they are now."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="name of the server, see list_mcp_servers")

    def handle(self, *args: Any, **options: Any) -> None:
        server = access_mcp_server(CLI_ACTOR, options["name"])
        tools = check_mcp_server(actor=CLI_ACTOR, server=server).tools
        self.table(("TOOL", "DESCRIPTION"), [(tool["name"], tool["description"]) for tool in tools])
