from typing import Any

from django.core.management.base import CommandError, CommandParser

from common.commands import QuireCommand, read_password
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import find_user


class Command(QuireCommand):
    help = "Set or remove a user's password. The user's sessions end."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username", help="see list_users")
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument(
            "--password-stdin", action="store_true", help="read the password from standard input"
        )
        which.add_argument(
            "--none",
            action="store_true",
            help="remove the password: the user logs in by single sign-on only",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        password = read_password(options)
        if password == "":
            raise CommandError("No password on standard input.")
        user = find_user(options["username"])
        actions.set_password(actor=CLI_ACTOR, user=user, password=password)
        self.stdout.write(f"{user} has {'another password' if password else 'no password'}.")
