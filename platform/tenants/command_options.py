"""What the commands for tenants and keys read from their command lines."""

import argparse
import re
from argparse import BooleanOptionalAction
from datetime import UTC, datetime, timedelta
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils import timezone
from django.utils.dateparse import parse_date, parse_datetime

from tenants import secrets
from tenants.actions import LIMITS, OWN
from tenants.models import ApiKey

UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}
#: For the help of every option or argument that `find_key` reads.
KEY_HELP = "its id from list_keys, its prefix (sk-quire-...), or the whole key"


def parse_span(text: str) -> timedelta | None:
    """`90d`, `12h`, `30m` or `0`; None for anything else."""
    if text == "0":
        return timedelta(0)
    match = re.fullmatch(r"(\d{1,6})([mhd])", text, re.ASCII)
    return int(match[1]) * UNITS[match[2]] if match else None


def parse_expiry(text: str, option: str = "--expires") -> datetime:
    """`90d`, `12h`, `30m`, `2027-01-31` or `2027-01-31T12:00` (UTC). Raises CommandError."""
    if span := parse_span(text):
        return timezone.now() + span
    try:
        moment = parse_datetime(text)
        if moment is None and (day := parse_date(text)):
            moment = datetime.combine(day, datetime.min.time())
    except ValueError as error:
        raise CommandError(f"{option} {text}: {error}.") from error
    if moment is None:
        raise CommandError(f"{option} {text}: use 90d, 12h, 30m, or a date such as 2027-01-31.")
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def comma_list(text: str) -> list[str]:
    """The words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def add_limit_options(parser: CommandParser, *, defaults: bool) -> None:
    """What a tenant may have: `actions.LIMITS`. `defaults`: whether help tells a new one's."""

    def also(text: str) -> str:
        return f" (default: {text})" if defaults else ""

    parser.add_argument(
        "--keep-usage-days",
        type=int,
        metavar="N",
        help=f"days to keep single requests in the usage ledger; 0: forever{also('0')}",
    )
    parser.add_argument(
        "--keep-content-days",
        type=int,
        metavar="N",
        help="files, batches and stored answers are kept for N days at most; 0: until they expire "
        f"by themselves, if at all{also('0')}",
    )
    parser.add_argument(
        "--store-prompts",
        action=BooleanOptionalAction,
        help=f"store prompts and completions with request logs{also('no')}",
    )
    parser.add_argument(
        "--weight",
        type=float,
        help=f"share of a busy engine relative to other tenants{also('1')}",
    )
    parser.add_argument(
        "--kv-reserved-fraction",
        type=float,
        help=f"part of each replica's KV cache that is reserved for it{also('0')}",
    )
    parser.add_argument(
        "--kv-max-fraction",
        type=float,
        help=f"part of each replica's KV cache that it may use at most{also('1')}",
    )
    parser.add_argument(
        "--max-priority",
        type=int,
        metavar="N",
        help="its requests may ask for a `priority` down to -N, which runs before higher ones"
        f"{also('0')}",
    )
    parser.add_argument(
        "--requests-per-minute",
        type=int,
        metavar="N",
        help="requests a minute, of all of its keys together; 0: no limit"
        + also("QUIRE_REQUESTS_PER_MINUTE"),
    )
    parser.add_argument(
        "--tokens-per-minute",
        type=int,
        metavar="N",
        help="tokens a minute, prompts and outputs together; 0: no limit"
        + also("QUIRE_TOKENS_PER_MINUTE"),
    )
    parser.add_argument(
        "--max-running-requests",
        type=int,
        metavar="N",
        help=f"maximum concurrent requests of the tenant; 0: no limit{also('0')}",
    )
    parser.add_argument(
        "--max-context-tokens",
        type=int,
        metavar="N",
        help=f"maximum tokens of a request, prompt plus output; 0: the model's limit{also('0')}",
    )
    parser.add_argument(
        "--allowed-models",
        type=comma_list,
        metavar="A,B",
        help=f"the only models that it may use; '': all that it can see{also('all')}",
    )
    parser.add_argument(
        "--keep-conversations",
        type=yes_or_no,
        metavar="YES|NO",
        help=f"whether the playground keeps conversations on the server{also('yes')}",
    )
    parser.add_argument(
        "--time-zone",
        metavar="ZONE",
        help="when days, weeks and months of its budgets begin, such as Europe/Berlin"
        f"{also('UTC')}",
    )


def yes_or_no(text: str) -> bool:
    """Raises ArgumentTypeError."""
    word = text.strip().lower()
    if word not in ("yes", "no"):
        raise argparse.ArgumentTypeError(f"must be yes or no, got {text!r}")
    return word == "yes"


def find_key(text: str) -> ApiKey:
    """The key that `KEY_HELP`'s words name, or a `CommandError`."""
    rest = text.strip().removeprefix(secrets.PREFIX).rstrip(".")
    public_id = rest[: secrets.PUBLIC_CHARS]
    key = ApiKey.objects.select_related("tenant").filter(public_id=public_id).first()
    if key is None:
        raise CommandError(f"Key {public_id!r} not found. See manage.py list_keys.")
    return key


def limits_of(options: dict[str, Any]) -> dict[str, Any]:
    """What `add_limit_options` has read, for the actions: what is named alone."""
    found = {n: options[n] for n in (*LIMITS, *OWN) if options[n] is not None}
    for name in ("keep_usage_days", "keep_content_days"):
        if found.get(name) == 0:
            found[name] = None
    return found
