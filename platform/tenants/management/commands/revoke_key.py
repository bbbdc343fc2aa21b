from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import KEY_HELP, find_key


class Command(QuireCommand):
    help = "Revoke an API key. Gateways refuse it within seconds; running streams end."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("key", help=KEY_HELP)

    def handle(self, *args: Any, **options: Any) -> None:
        key = find_key(options["key"])
        if key.state() == "revoked":
            self.stdout.write(f"{key} was revoked already.")
            return
        actions.revoke_key(actor=CLI_ACTOR, key=key)
        self.stdout.write(f"{key} of {key.tenant} is revoked.")
