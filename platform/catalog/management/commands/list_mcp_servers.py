from typing import Any

from catalog.mcp_servers import access_mcp_servers
from common.commands import QuireCommand
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = "List MCP servers, whose tools run in the playground."

    def handle(self, *args: Any, **options: Any) -> None:
        rows = []
        for server in access_mcp_servers(CLI_ACTOR):
            slugs = ", ".join(tenant.slug for tenant in server.tenants.all())
            tenants = "all" if server.public else slugs or "none"
            tested = f"{server.tested_at:%Y-%m-%d %H:%M}" if server.tested_at else "never"
            rows.append((server.name, server.url, tenants, len(server.tools), tested, server.error))
        self.table(("NAME", "URL", "TENANTS", "TOOLS", "TESTED (UTC)", "ERROR"), rows)
