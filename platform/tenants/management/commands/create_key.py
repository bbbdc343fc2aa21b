"""`manage.py create_key --tenant NAME`."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils import timezone
from django.utils.dateparse import parse_date, parse_datetime

from tenants import actions, scopes
from tenants.actors import COMMAND_LINE
from tenants.commands import QuireCommand, find_tenant

UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}


def parse_expiry(text: str) -> datetime:
    """`90d`, `12h`, `30m`, `2027-01-31` or `2027-01-31T12:00` (UTC). Raises CommandError."""
    if match := re.fullmatch(r"(\d{1,6})([mhd])", text):
        return timezone.now() + int(match[1]) * UNITS[match[2]]
    try:
        moment = parse_datetime(text)
        if moment is None and (day := parse_date(text)):
            moment = datetime.combine(day, datetime.min.time())
    except ValueError as error:
        raise CommandError(f"--expires {text}: {error}.") from error
    if moment is None:
        raise CommandError(f"--expires {text}: use 90d, 12h, 30m, or a date such as 2027-01-31.")
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


class Command(QuireCommand):
    """Make an API key."""

    help = (
        "Make an API key and print it. This is the only time that it can be seen: the database "
        "keeps its hash alone."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Whose key, and what it may."""
        parser.add_argument("--tenant", required=True, metavar="NAME", help="its short name")
        parser.add_argument("--name", default="", help="what the key is for")
        parser.add_argument(
            "--scopes",
            metavar="A,B",
            help=f"of {', '.join(sorted(scopes.ALL))} "
            f"(default: {','.join(sorted(scopes.DEFAULT))})",
        )
        parser.add_argument(
            "--expires", metavar="WHEN", help="90d, 12h, 30m, or a date (default: never)"
        )
        parser.add_argument("--requests-per-minute", type=int, metavar="N")
        parser.add_argument("--tokens-per-minute", type=int, metavar="N")
        parser.add_argument("--plain", action="store_true", help="print the key and nothing else")

    def handle(self, *args: Any, **options: Any) -> None:
        """Create and print it."""
        wanted = options["scopes"]
        made = actions.create_key(
            actor=COMMAND_LINE,
            tenant=find_tenant(options["tenant"]),
            name=options["name"],
            scopes=None if wanted is None else [word.strip() for word in wanted.split(",")],
            expires_at=parse_expiry(options["expires"]) if options["expires"] else None,
            requests_per_minute=options["requests_per_minute"],
            tokens_per_minute=options["tokens_per_minute"],
        )
        self.stdout.write(made.secret)
        if not options["plain"]:
            until = made.key.expires_at
            self.note(
                f"A key of {made.key.tenant} for {', '.join(made.key.scopes)}"
                f"{f', until {until:%Y-%m-%d %H:%M} UTC' if until else ''}. "
                "Keep it now: it can't be shown again."
            )
