from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import add_role_option, add_tenant_option, find_tenant


class Command(QuireCommand):
    help = "Create a service account: an identity for programs."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="name, such as 'nightly reports'")
        add_tenant_option(parser)
        add_role_option(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        account = actions.create_service_account(
            actor=CLI_ACTOR,
            tenant=find_tenant(options["tenant"]),
            name=options["name"],
            role=options["role"],
        )
        self.stdout.write(account.name)
