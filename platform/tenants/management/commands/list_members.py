from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from tenants.cli import find_tenant
from tenants.models import Membership


class Command(QuireCommand):
    help = "List members of tenants and their roles."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", metavar="NAME", help="list members of this tenant only")

    def handle(self, *args: Any, **options: Any) -> None:
        rows = Membership.objects.select_related("tenant", "user").order_by("tenant__slug", "pk")
        if options["tenant"]:
            rows = rows.filter(tenant=find_tenant(options["tenant"]))
        self.table(
            ("TENANT", "NAME", "ROLE", "SINCE"),
            [(m.tenant, m.user, m.role, f"{m.created_at:%Y-%m-%d}") for m in rows],
        )
