"""`manage.py revoke_invitation ID`."""

from typing import Any

from django.core.management.base import CommandError, CommandParser

from tenants import actions
from tenants.actors import COMMAND_LINE
from tenants.commands import QuireCommand
from tenants.models import Invitation


class Command(QuireCommand):
    """Take an invitation back."""

    help = "Take an invitation back: its link lets nobody in any more."

    def add_arguments(self, parser: CommandParser) -> None:
        """Which."""
        parser.add_argument("id", type=int, help="see list_invitations")

    def handle(self, *args: Any, **options: Any) -> None:
        """End it."""
        found = Invitation.objects.select_related("tenant").filter(pk=options["id"]).first()
        if found is None:
            raise CommandError(f"There is no invitation {options['id']}.")
        actions.revoke_invitation(actor=COMMAND_LINE, invitation=found)
        self.stdout.write(f"The invitation of {found.email} to {found.tenant} has ended.")
