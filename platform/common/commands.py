"""Base class of Quire's commands: clear errors, tables, the data directory."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from functools import partial
from typing import Any, NoReturn, Self

import redis
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import OperationalError, ProgrammingError, connections
from django.utils import timezone
from django.utils.dateparse import parse_date, parse_datetime

from common.installation import PROGRAM
from common.redaction import without_credentials
from engine.contract.command_line import expand_args
from engine.contract.errors import ConfigError, QuireError

_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f]+")
UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}


def parse_span(text: str) -> timedelta | None:
    """Parse `90d`, `12h`, `30m` or `0`; None for anything else."""
    if text == "0":
        return timedelta(0)
    match = re.fullmatch(r"(\d{1,6})([mhd])", text, re.ASCII)
    return int(match[1]) * UNITS[match[2]] if match else None


def parse_expiry(text: str, option: str = "--expires") -> datetime:
    """Parse `90d`, `12h`, `30m`, `2027-01-31` or `2027-01-31T12:00` (UTC). Raises CommandError."""
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
    """Split a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def yes_or_no(text: str) -> bool:
    """Raises ArgumentTypeError."""
    word = text.strip().lower()
    if word not in ("yes", "no"):
        raise argparse.ArgumentTypeError(f"must be yes or no, got {text!r}")
    return word == "yes"


def add_wait_options(
    parser: CommandParser, until: str, *, timeout_s: int, timeout_help: str = "seconds for --wait"
) -> None:
    """Add `--wait`, whose help is `until`, and `--timeout`."""
    parser.add_argument("--wait", action="store_true", help=until)
    parser.add_argument(
        "--timeout",
        type=float,
        default=timeout_s,
        metavar="S",
        help=f"{timeout_help} (default: {timeout_s})",
    )


def error_with_suggestion(
    parser: CommandParser, fail: Callable[[str], NoReturn], message: str
) -> NoReturn:
    """Fail with argparse's message; for an unknown flag suggest the closest one."""
    if message.startswith("unrecognized arguments:"):
        flag = message.partition(":")[2].split()[0].partition("=")[0]
        flags = [option for action in parser._actions for option in action.option_strings]
        if matches := get_close_matches(flag, flags, n=1):
            message += f". Did you mean {matches[0]}?"
    fail(message)


CONNECT_TIMEOUT_S = 10
#: Colours of states in tables, by the names of Django's styles.
STATE_STYLES = {
    **dict.fromkeys(("ready", "loaded", "active", "live"), "SUCCESS"),
    **dict.fromkeys(("loading", "draining", "idle", "sleeping"), "WARNING"),
    **dict.fromkeys(("failed", "offline", "stalled", "revoked", "expired"), "ERROR"),
}


class QuireCommand(BaseCommand):
    """Turns expected errors into one clear line, and takes `--data-dir`."""

    requires_system_checks: list[str] | tuple[str, ...] = ()
    #: Whether the command needs the database.
    needs_database = True
    #: Whether it parses its command line like an engine's: see `engine.contract.command_line`.
    takes_engine_settings = False
    #: Whether it was started from a shell, not by `call_command`.
    _is_command_line = False

    def run_from_argv(self, argv: list[str]) -> None:
        """Parse the command line; one with engine settings is parsed as vLLM does."""
        self._is_command_line = True
        if self.takes_engine_settings:
            try:
                parser = self.create_parser(argv[0], argv[1])
                argv = [*argv[:2], *expand_args(argv[2:], parser)]
            except ConfigError as error:
                self.stderr.write(f"{argv[1]}: {error.message}")
                sys.exit(2)
        super().run_from_argv(argv)

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Add the options of all commands; `manage.py` itself handles them."""
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parser.add_argument(
            "--data-dir",
            metavar="DIR",
            help="where this instance keeps its files (default: QUIRE_DATA_DIR or .quire)",
        )
        parser.error = partial(error_with_suggestion, parser, parser.error)  # type: ignore[method-assign]
        return parser

    def execute(self, *args: Any, **options: Any) -> Any:
        """Run; convert refusals and missing services to a `CommandError`."""
        try:
            return self._execute(*args, **options)
        except CommandError as error:
            if not self._is_command_line or options.get("traceback"):
                raise
            self.stderr.write(f"Error: {error}")
            sys.exit(error.returncode)

    def _execute(self, *args: Any, **options: Any) -> Any:
        try:
            if self.needs_database:
                check_database()
            return super().execute(*args, **options)
        except QuireError as error:
            raise CommandError(error.message) from error
        except redis.RedisError as error:
            raise CommandError(
                f"Redis at {without_credentials(settings.REDIS_URL)} can't be used: "
                f"{as_sentence(error)} "
                f"Does `{PROGRAM} up` run in this data dir, or is REDIS_URL right?"
            ) from error
        except (OperationalError, ProgrammingError) as error:
            raise_database_error(error)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print columns; states below `STATE` are coloured on a terminal."""
        # Untrusted text must neither control the terminal nor break the line.
        cells = [list(head), *([_CONTROLS.sub(" ", str(cell)) for cell in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            padded[-1] = row[-1]
            for index, title in enumerate(head):
                if title == "STATE" and row[index] in STATE_STYLES:
                    padded[index] = getattr(self.style, STATE_STYLES[row[index]])(padded[index])
            self.stdout.write("  ".join(padded).rstrip())

    def print_hint(self, text: str) -> None:
        """Print to standard error, which keeps standard output readable for scripts."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


class ProgressBar:
    """A progress bar on standard error. Use it in `with`, which clears it.

    Args:
        label: what is in progress; if standard error isn't a terminal, a line with it is printed at
            each quarter. "": nothing is printed then.
    """

    WIDTH = 30

    def __init__(self, label: str = "") -> None:
        self.label = label
        self._text = ""
        self._num_quarters = 0

    def __enter__(self) -> Self:
        """Start without drawing."""
        return self

    def __exit__(self, *error: object) -> None:
        """Clear the line."""
        self.clear()

    @property
    def is_visible(self) -> bool:
        """Whether standard error is a terminal."""
        return sys.stderr.isatty()

    def show(self, fraction: float) -> None:
        """Draw it at a fraction in [0, 1], if that changes its look."""
        fraction = min(1.0, max(0.0, fraction))
        if not self.is_visible:
            num_quarters = int(4 * fraction)
            if self.label and num_quarters > self._num_quarters:
                sys.stderr.write(f"{self.label}: {num_quarters / 4:.0%}\n")
            self._num_quarters = max(num_quarters, self._num_quarters)
            return
        filled = round(self.WIDTH * fraction)
        bar = f"[{'#' * filled}{'.' * (self.WIDTH - filled)}] {fraction:4.0%}"
        text = f"{self.label} {bar}".lstrip()
        if text != self._text:
            self._draw(text)

    def clear(self) -> None:
        """Clear the line, so that other text can be printed there."""
        self._draw("")

    def _draw(self, text: str) -> None:
        self._text = text
        if self.is_visible:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()


def check_database() -> None:
    """Connect to PostgreSQL once, to get its own error message.

    The pool would retry for ten seconds, log each attempt and then only report that it gave up.
    Raises: OperationalError.
    """
    default = connections["default"]
    if default.vendor != "postgresql":
        return
    unpooled = deepcopy(default.settings_dict)
    unpooled["OPTIONS"].pop("pool", None)
    unpooled["OPTIONS"].setdefault("connect_timeout", CONNECT_TIMEOUT_S)
    probe = type(default)(unpooled, "default")
    try:
        probe.ensure_connection()
    finally:
        probe.close()


def raise_database_error(error: Exception) -> NoReturn:
    """Raise a `CommandError` that states the remedy for a database error."""
    text = str(error).lower()
    if "no such table" in text or "does not exist" in text or "no such column" in text:
        raise CommandError(
            f"The database is not set up yet: run `{PROGRAM} up`, or `{PROGRAM} migrate`."
        ) from error
    default = settings.DATABASES["default"]
    location = default["NAME"]
    if default.get("HOST"):
        location = f"{default['NAME']} at {default['HOST']}:{default['PORT'] or 5432}"
    if "disk is full" in text or "no space left" in text:
        raise CommandError(
            f"The disk of the database {location} is full: make room there."
        ) from error
    raise CommandError(
        f"The database {location} can't be used: {as_sentence(error)} "
        "Does it run, and is DATABASE_URL right?"
    ) from error


def as_sentence(error: Exception) -> str:
    """The error's message, with a full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


def read_password(options: dict[str, Any]) -> str | None:
    """The line that `--password-stdin` reads: arguments would be visible in process lists."""
    return sys.stdin.readline().rstrip("\n") if options["password_stdin"] else None
