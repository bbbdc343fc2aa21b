from typing import Any

from django.core.management.base import CommandError, CommandParser

from common.commands import QuireCommand
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import find_user


class Command(QuireCommand):
    help = (
        "Change a user's email address, activation or operator status. Deactivating a user or "
        "revoking the operator role ends sessions, sockets and keys within seconds."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username", help="see list_users")
        parser.add_argument("--email", help="new email address")
        switch = parser.add_mutually_exclusive_group()
        switch.add_argument("--off", action="store_true", help="deactivate the user")
        switch.add_argument("--on", action="store_true", help="reactivate the user")
        standing = parser.add_mutually_exclusive_group()
        standing.add_argument(
            "--operator",
            action="store_true",
            help="make the user an operator of the installation",
        )
        standing.add_argument("--no-operator", action="store_true", help="revoke the operator role")

    def handle(self, *args: Any, **options: Any) -> None:
        changes: dict[str, Any] = {}
        if options["email"] is not None:
            changes["email"] = options["email"]
        if options["off"] or options["on"]:
            changes["is_active"] = options["on"]
        if options["operator"] or options["no_operator"]:
            changes |= {"is_superuser": options["operator"], "is_staff": options["operator"]}
        if not changes:
            raise CommandError("Nothing to change: name --email, --off, --on or --operator.")
        user = find_user(options["username"])
        actions.update_user(actor=CLI_ACTOR, user=user, **changes)
        self.stdout.write(f"{user} is changed.")
