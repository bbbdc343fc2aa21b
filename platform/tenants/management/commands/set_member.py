from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import add_role_option, add_tenant_option, find_tenant, find_user
from tenants.models import Membership


class Command(QuireCommand):
    help = (
        "Add a user to a tenant or change a member's role. A lower role ends the user's sessions, "
        "sockets and keys there within seconds."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username", help="see list_users")
        add_tenant_option(parser)
        add_role_option(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        user, tenant = find_user(options["username"]), find_tenant(options["tenant"])
        membership = Membership.objects.filter(tenant=tenant, user=user).first()
        role = options["role"]
        if membership is None:
            actions.add_member(actor=CLI_ACTOR, tenant=tenant, user=user, role=role)
        else:
            actions.change_role(actor=CLI_ACTOR, membership=membership, role=role)
        self.stdout.write(f"{user} is {role} of {tenant}.")
