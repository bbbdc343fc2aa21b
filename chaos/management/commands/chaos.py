"""`manage.py chaos`: does anybody get hurt when things break?"""

from __future__ import annotations

import asyncio
import math
import re
import signal
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from redis import RedisError

from chaos.faults import FAULTS
from chaos.instance import StartFailed
from chaos.kills import Kills
from chaos.report import passed, summary, table
from chaos.run import Faults, Outcome, Run

BEGIN, END = "<!-- chaos: begin -->", "<!-- chaos: end -->"


class Command(BaseCommand):
    """Start an instance, load it, break it, count."""

    requires_system_checks: list[str] = []
    help = (
        "Start an instance of its own in a temporary folder, ask it for answers of every kind, and "
        "meanwhile kill, freeze, drain and cut off its processes, restart its Redis, fill its disk "
        "and set its clock back. Prints what became of each kind of request beside each fault, and "
        "the ledger against what clients received. Fails unless nothing was lost, doubled, changed "
        "or billed wrongly. Filling the disk takes root, and is skipped without."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """How long, in which order, and where to write the table."""
        harm = parser.add_mutually_exclusive_group()
        harm.add_argument(
            "--minutes",
            type=_minutes,
            default=1.0,
            help="how long to do faults (default: %(default)s)",
        )
        harm.add_argument(
            "--kills",
            type=_count,
            metavar="N",
            help="instead of all that: kill replicas N times, at random moments, under streams of "
            "every kind, which must be the same to the last token and log probability",
        )
        parser.add_argument(
            "--fault",
            action="append",
            choices=list(FAULTS),
            metavar="NAME",
            help="only this fault; may be given several times. All: " + ", ".join(FAULTS),
        )
        parser.add_argument(
            "--postgresql",
            action="store_true",
            help="give it a PostgreSQL of its own, and take that away too",
        )
        parser.add_argument(
            "--disaggregated",
            action="store_true",
            help="give it a replica that computes prompts for the others, and harm that and the KV "
            "blocks between them too",
        )
        parser.add_argument(
            "--ranks",
            type=_count,
            default=1,
            metavar="N",
            help="processes that share the model of each replica, for faults of ranks (default: "
            "%(default)s)",
        )
        parser.add_argument(
            "--streams",
            type=_count,
            default=32,
            help="with --kills: streams at a time, every second one greedy (default: %(default)s)",
        )
        parser.add_argument(
            "--tokens",
            type=_count,
            default=600,
            help="with --kills: most tokens of a stream (default: %(default)s)",
        )
        parser.add_argument(
            "--seed",
            type=int,
            default=0,
            help="the same faults in the same order for the same seed (default: %(default)s)",
        )
        parser.add_argument(
            "--write", type=Path, metavar="FILE", help=f"put the table between {BEGIN} and {END}"
        )

        parser.add_argument("--log", type=Path, metavar="FILE", help="keep the instance's log here")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run, tell, and judge."""
        if sys.platform != "linux":
            raise CommandError("chaos needs Linux: it works by /proc and signals.")
        if options["write"]:
            _check_page(options["write"])
        try:
            outcome = asyncio.run(_run_until_signal(self._run(options)))
        except StartFailed as error:
            raise CommandError(str(error)) from error
        except asyncio.CancelledError:
            raise CommandError("Stopped.") from None
        self.stdout.write(f"\n{table(outcome)}\n\n{summary(outcome)}")
        for line in outcome.difference.differences[:20]:
            self.stdout.write(f"  {line}")
        if options["write"]:
            _write(options["write"], outcome)
        if not passed(outcome):
            raise CommandError("Not all went as it does without faults: see above.")

    def _run(self, options: dict[str, Any]) -> Run:
        end = options["seed"], self._log_line, options["log"]
        if options["kills"]:
            names = ("fault", "postgresql", "disaggregated")
            if any(options[name] for name in names) or options["ranks"] > 1:
                raise CommandError(
                    "--kills goes without --fault, --postgresql, --disaggregated, --ranks."
                )
            return Kills(options["kills"], options["streams"], options["tokens"], *end)
        kinds = {name: options[name] for name in ("postgresql", "disaggregated")}
        faults, ranks = options["fault"] or FAULTS, options["ranks"]
        return Faults(options["minutes"], *end, faults, **kinds, num_ranks=ranks)

    def _log_line(self, text: str) -> None:
        self.stderr.write(text)
        self.stderr.flush()


async def _run_until_signal(run: Run) -> Outcome:
    """The run. A signal ends it and all that it started; a second one can't break that off."""
    task = asyncio.ensure_future(run.run())
    stop_requested = asyncio.Event()

    def stop() -> None:
        if not stop_requested.is_set():
            stop_requested.set()
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        return await task
    except RedisError as error:
        if stop_requested.is_set():  # a fault that was left midway
            raise asyncio.CancelledError from error
        raise


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        raise ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not (math.isfinite(minutes) and 0 < minutes <= 10_000):
        raise ArgumentTypeError(f"must be in (0, 10000], got {text}")
    return minutes


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 10_000):
        raise ArgumentTypeError(f"must be a whole number in [1, 10000], got {text!r}")
    return int(text)


def _check_page(page: Path) -> None:
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{page}: {error.strerror}") from error
    if not 0 <= text.find(BEGIN) < text.find(END):
        raise CommandError(f"{page} has no {BEGIN} before an {END}.")


def _write(page: Path, outcome: Outcome) -> None:
    text = page.read_text(encoding="utf-8")
    new = f"{BEGIN}\n\n{summary(outcome)}\n\n{table(outcome)}\n\n{END}"
    section = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    page.write_text(section.sub(lambda _: new, text, count=1), encoding="utf-8")
