import sys
from typing import Any

from django.core.management.base import CommandError, CommandParser

from common.commands import QuireCommand
from metering.reconciliation import MAX_DAYS, Reconciliation, reconcile
from metering.redis_scripts import sync_client

#: Ids that are printed at most.
MAX_PRINTED_IDS = 20


class Command(QuireCommand):
    help = (
        "Compare the usage ledger with the engines' own counters, by tenant and model. NOT BILLED: "
        "tokens computed but not charged (after a stop string, after a disconnect, failed "
        "requests). The exit status is 1 if DIFFERENCE isn't 0 or a request was never settled."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--days",
            type=int,
            default=2,
            metavar="N",
            help="days (UTC) to compare, today included; at most 35 (default: %(default)s)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        days = options["days"]
        if not 1 <= days <= MAX_DAYS:
            raise CommandError(f"--days must be in [1, {MAX_DAYS}], got {days}.")
        client = sync_client()
        try:
            result = reconcile(client, days)
        finally:
            client.close()
        if result.since is None:
            self.stdout.write("No gateway has counted anything yet.")
            return
        self._tell(result)
        if not result.is_balanced:
            sys.exit(1)

    def _tell(self, result: Reconciliation) -> None:
        rows = [
            (line.tenant, line.model, what, *(column[index] for column in _columns(line)))
            for line in result.lines
            for index, what in enumerate(("prompt", "output"))
        ]
        head = ("TENANT", "MODEL", "TOKENS", "ENGINE", "NOT BILLED", "LEDGER", "DIFFERENCE")
        self.table(head, rows)
        self.stdout.write(
            f"Requests since {result.since:%Y-%m-%d %H:%M:%S} UTC; {result.running} are running."
        )
        if result.lost:
            more = (
                f" and {len(result.lost) - MAX_PRINTED_IDS} more"
                if len(result.lost) > MAX_PRINTED_IDS
                else ""
            )
            names = ", ".join(result.lost[:MAX_PRINTED_IDS])
            self.stdout.write(f"Computed and never settled: {names}{more}.")
        self.stdout.write("They agree." if result.is_balanced else "They differ.")


def _columns(line: Any) -> tuple[list[int], ...]:
    return line.engine, line.unbilled, line.ledger, line.difference
