from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import add_tenant_option, find_tenant


class Command(QuireCommand):
    help = (
        "Delete all data of a tenant permanently: keys, files, responses, usage, members. The "
        "audit log and the user accounts stay."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        add_tenant_option(parser)
        parser.add_argument(
            "--confirm", required=True, metavar="NAME", help="tenant slug again, as a confirmation"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        tenant = find_tenant(options["tenant"])
        actions.erase_tenant(actor=CLI_ACTOR, tenant=tenant, confirm=options["confirm"])
        removed = actions.erase_tenant_data(tenant=tenant)
        summary = ", ".join(f"{count:,} {name}" for name, count in removed.items())
        self.stdout.write(f"{tenant} is erased: {summary or 'nothing was kept'}.")
