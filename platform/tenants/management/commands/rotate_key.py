from typing import Any

from django.core.management.base import CommandError, CommandParser

from common.commands import QuireCommand, parse_span
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import KEY_HELP, find_key


class Command(QuireCommand):
    help = (
        "Replace an API key and print the new one once. The new key has the same name, scopes, "
        "limits and expiry; the old one stays valid for --overlap, so that clients can switch."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("key", help=KEY_HELP)
        parser.add_argument(
            "--overlap",
            metavar="SPAN",
            default="1d",
            help="how long the old key stays valid: 7d, 12h, 30m, at most 30d; 0 revokes it "
            "immediately (default: %(default)s)",
        )
        parser.add_argument("--plain", action="store_true", help="print the key and nothing else")

    def handle(self, *args: Any, **options: Any) -> None:
        overlap = parse_span(options["overlap"])
        if overlap is None:
            raise CommandError(f"--overlap {options['overlap']}: use 7d, 12h, 30m or 0.")
        old = find_key(options["key"])
        new_key = actions.rotate_key(actor=CLI_ACTOR, key=old, overlap=overlap)
        self.stdout.write(new_key.secret)
        if not options["plain"]:
            old.refresh_from_db()
            if old.state() == "revoked":
                fate = "is revoked"
            else:
                fate = f"stays valid until {old.expires_at:%Y-%m-%d %H:%M} UTC"
            self.print_hint(
                f"The new key of {old.tenant}: keep it now, it can't be shown again. "
                f"The old one, {old}, {fate}."
            )
