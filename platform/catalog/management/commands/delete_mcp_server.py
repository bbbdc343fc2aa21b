from typing import Any

from django.core.management.base import CommandParser

from catalog.mcp_servers import access_mcp_server, delete_mcp_server
from common.commands import QuireCommand
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = "Delete an MCP server: its tools no longer run in the playground."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="name of the server, see list_mcp_servers")

    def handle(self, *args: Any, **options: Any) -> None:
        server = access_mcp_server(CLI_ACTOR, options["name"])
        delete_mcp_server(actor=CLI_ACTOR, server=server)
        self.stdout.write(f"{options['name']} is deleted.")
