"""`manage.py revoke_key ID`."""

from typing import Any

from django.core.management.base import CommandError, CommandParser

from tenants import actions, secrets
from tenants.actors import COMMAND_LINE
from tenants.commands import QuireCommand
from tenants.models import ApiKey


class Command(QuireCommand):
    """Revoke an API key."""

    help = "Revoke an API key. Gateways refuse it within seconds, streams that run end."

    def add_arguments(self, parser: CommandParser) -> None:
        """Which key."""
        parser.add_argument(
            "key", help="its id from list_keys, its prefix (sk-quire-...), or the whole key"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Find and revoke it."""
        text = options["key"].strip().removeprefix(secrets.PREFIX).rstrip(".")
        public_id = text[: secrets.PUBLIC_CHARS]
        key = ApiKey.objects.select_related("tenant").filter(public_id=public_id).first()
        if key is None:
            raise CommandError(f"There is no key {public_id!r}. See manage.py list_keys.")
        if key.state() == "revoked":
            self.stdout.write(f"{key} was revoked already.")
            return
        actions.revoke_key(actor=COMMAND_LINE, key=key)
        self.stdout.write(f"{key} of {key.tenant} is revoked.")
