from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import add_tenant_option, find_member, find_tenant, find_user


class Command(QuireCommand):
    help = "Remove a member from a tenant. Ends the user's sessions and revokes their keys there."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username", help="see list_users")
        add_tenant_option(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        user, tenant = find_user(options["username"]), find_tenant(options["tenant"])
        actions.remove_member(actor=CLI_ACTOR, membership=find_member(tenant, user))
        self.stdout.write(f"{user} is no longer a member of {tenant}.")
