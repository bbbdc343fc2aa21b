from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand, read_password
from tenants import actions
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = (
        "Create a user. Without a password, the user signs in with single sign-on or resets it by "
        "mail. Add the user to a tenant with set_member or invite."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username", help="login name")
        parser.add_argument("--email", default="", help="email address")
        parser.add_argument(
            "--password-stdin", action="store_true", help="read a password from standard input"
        )
        parser.add_argument(
            "--operator", action="store_true", help="make the user an operator of the installation"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        user = actions.create_user(
            actor=CLI_ACTOR,
            username=options["username"],
            email=options["email"],
            password=read_password(options),
            is_superuser=options["operator"],
        )
        self.stdout.write(user.get_username())
