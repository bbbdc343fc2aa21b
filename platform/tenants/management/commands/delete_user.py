from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import find_user


class Command(QuireCommand):
    help = (
        "Delete a user. The user's sessions, sockets and keys end within seconds; the ledger and "
        "the audit log keep the name. A tenant's last owner stays: name another first."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username", help="see list_users")

    def handle(self, *args: Any, **options: Any) -> None:
        user = find_user(options["username"])
        actions.delete_user(actor=CLI_ACTOR, user=user)
        self.stdout.write(f"{user} is removed.")
