"""`manage.py erase_tenant --tenant NAME --confirm NAME`."""

from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import find_tenant


class Command(QuireCommand):
    """Remove all that is kept of a tenant, for good."""

    help = (
        "Delete all data of a tenant permanently: keys, files, responses, usage, members. The "
        "audit log and the user accounts stay."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--tenant", required=True, metavar="NAME", help="tenant slug, see list_tenants"
        )
        parser.add_argument(
            "--confirm", required=True, metavar="NAME", help="tenant slug again, as a confirmation"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Erase it, and print what was erased."""
        tenant = find_tenant(options["tenant"])
        actions.erase_tenant(actor=CLI_ACTOR, tenant=tenant, confirm=options["confirm"])
        removed = actions.erase_tenant_data(tenant=tenant)
        summary = ", ".join(f"{count:,} {name}" for name, count in removed.items())
        self.stdout.write(f"{tenant} is erased: {summary or 'nothing was kept'}.")
