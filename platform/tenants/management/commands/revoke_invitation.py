from typing import Any

from django.core.management.base import CommandError, CommandParser

from common.commands import QuireCommand
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.models import Invitation


class Command(QuireCommand):
    help = "Revoke an invitation that isn't accepted yet."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("id", type=int, help="see list_invitations")

    def handle(self, *args: Any, **options: Any) -> None:
        invitation = Invitation.objects.select_related("tenant").filter(pk=options["id"]).first()
        if invitation is None:
            raise CommandError(f"Invitation {options['id']} not found.")
        actions.revoke_invitation(actor=CLI_ACTOR, invitation=invitation)
        self.stdout.write(f"Invitation of {invitation.email} to {invitation.tenant} revoked.")
