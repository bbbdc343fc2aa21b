from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import add_tenant_option, find_account, find_tenant


class Command(QuireCommand):
    help = "Switch a service account off and revoke its keys for good."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="see list_service_accounts")
        add_tenant_option(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        account = find_account(find_tenant(options["tenant"]), options["name"])
        actions.retire_service_account(actor=CLI_ACTOR, account=account)
        self.stdout.write(f"Service account {account} deactivated; its keys are revoked.")
