from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from tenants.cli import find_tenant
from tenants.models import ServiceAccount


class Command(QuireCommand):
    help = "List the service accounts of tenants."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--tenant", metavar="NAME", help="list service accounts of this tenant only"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        accounts = ServiceAccount.objects.select_related("tenant").order_by("tenant__slug", "name")
        if options["tenant"]:
            accounts = accounts.filter(tenant=find_tenant(options["tenant"]))
        rows = [(a.tenant, a.name, a.role, "on" if a.active else "off") for a in accounts]
        self.table(("TENANT", "NAME", "ROLE", "STATE"), rows)
