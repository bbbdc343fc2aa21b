"""`manage.py erase_tenant --tenant NAME --confirm NAME`."""

from typing import Any

from django.core.management.base import CommandParser

from tenants import actions
from tenants.actors import COMMAND_LINE
from tenants.commands import QuireCommand, find_tenant


class Command(QuireCommand):
    """Remove all that is kept of a tenant, for good."""

    help = (
        "Remove all that is kept of a tenant, for good: keys, files, answers, usage, members. The"
        " audit log stays, and so do people: they belong to no tenant."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Whose, twice."""
        parser.add_argument("--tenant", required=True, metavar="NAME", help="its short name")
        parser.add_argument("--confirm", required=True, metavar="NAME", help="the same once more")

    def handle(self, *args: Any, **options: Any) -> None:
        """Erase it, and say what went."""
        tenant = find_tenant(options["tenant"])
        actions.erase_tenant(actor=COMMAND_LINE, tenant=tenant, confirm=options["confirm"])
        removed = actions.remove_data(tenant=tenant)
        told = ", ".join(f"{count:,} {name}" for name, count in removed.items())
        self.stdout.write(f"{tenant} is erased: {told or 'nothing was kept'}.")
