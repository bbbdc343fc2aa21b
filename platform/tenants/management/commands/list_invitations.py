"""`manage.py list_invitations`."""

from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from tenants.cli import find_tenant
from tenants.models import Invitation


class Command(QuireCommand):
    """List invitations."""

    help = "List open invitations. Their links were shown once and can't be shown again."

    def add_arguments(self, parser: CommandParser) -> None:
        """Which."""
        parser.add_argument("--tenant", metavar="NAME", help="only this tenant's")
        parser.add_argument("--all", action="store_true", help="those that ended too")

    def handle(self, *args: Any, **options: Any) -> None:
        """Print a table."""
        found = Invitation.objects.select_related("tenant", "created_by")
        if options["tenant"]:
            found = found.filter(tenant=find_tenant(options["tenant"]))
        rows = [
            (i.pk, i.tenant, i.email, i.role, i.state(), f"{i.expires_at:%Y-%m-%d %H:%M}")
            for i in found
            if options["all"] or i.state() == "open"
        ]
        self.table(("ID", "TENANT", "MAIL", "ROLE", "STATE", "UNTIL (UTC)"), rows)
