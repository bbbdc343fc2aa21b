"""`manage.py create_user NAME`."""

from typing import Any

from django.core.management.base import CommandParser

from tenants import actions
from tenants.actors import COMMAND_LINE
from tenants.commands import QuireCommand, read_password


class Command(QuireCommand):
    """Add a person."""

    help = (
        "Add a person who logs in. Without a password they come in by single sign-on, or have a "
        "new one mailed. set_member or invite makes them a member of a tenant."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Who."""
        parser.add_argument("username", help="what they log in with")
        parser.add_argument("--email", default="", help="their mail address")
        parser.add_argument(
            "--password-stdin", action="store_true", help="read a password from standard input"
        )
        parser.add_argument(
            "--operator", action="store_true", help="they run the whole installation"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Create them."""
        user = actions.create_user(
            actor=COMMAND_LINE,
            username=options["username"],
            email=options["email"],
            password=read_password(options),
            is_superuser=options["operator"],
        )
        self.stdout.write(user.get_username())
