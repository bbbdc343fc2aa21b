"""`manage.py changepassword [NAME]`: Django's command, through the action that sets passwords."""

import getpass
from typing import Any

from django.contrib.auth.management.commands import changepassword
from django.core.management.base import CommandError

from engine.contract.errors import QuireError
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import find_user

TRIES = 3


class Command(changepassword.Command):
    help = "Change a user's password. The user's sessions end."

    def handle(self, *args: Any, **options: Any) -> str:
        """Ask until both are equal and strong enough, at most `TRIES` times."""
        user = find_user(options["username"] or getpass.getuser())
        self.stdout.write(f"Changing password for user '{user}'")
        for _ in range(TRIES):
            # Methods that django-stubs leaves out.
            password = self._get_pass()  # type: ignore[attr-defined]
            again = self._get_pass("Password (again): ")  # type: ignore[attr-defined]
            if password != again:
                self.stdout.write("Passwords do not match. Please try again.")
                continue
            try:
                actions.set_password(actor=CLI_ACTOR, user=user, password=password)
            except QuireError as error:
                self.stderr.write(error.message)
            else:
                return f"Password changed successfully for user '{user}'"
        raise CommandError(f"The password of {user} stays as it was after {TRIES} attempts.")
