from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from tenants.cli import find_tenant
from tenants.models import Invitation


class Command(QuireCommand):
    help = "List open invitations. Their links were shown once and can't be shown again."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", metavar="NAME", help="list invitations of this tenant only")
        parser.add_argument(
            "--all", action="store_true", help="include accepted, expired and revoked invitations"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        invitations = Invitation.objects.select_related("tenant", "created_by")
        if options["tenant"]:
            invitations = invitations.filter(tenant=find_tenant(options["tenant"]))
        rows = [
            (i.pk, i.tenant, i.email, i.role, i.state(), f"{i.expires_at:%Y-%m-%d %H:%M}")
            for i in invitations
            if options["all"] or i.state() == "open"
        ]
        self.table(("ID", "TENANT", "EMAIL", "ROLE", "STATE", "UNTIL (UTC)"), rows)
