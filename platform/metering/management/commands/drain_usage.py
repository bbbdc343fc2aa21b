from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from metering.drain import CLAIM_AFTER_MS, drain_once
from metering.redis_scripts import sync_client


class Command(QuireCommand):
    help = (
        "Write the usage that waits in Redis into the ledger, once. Gateways do this continuously; "
        "use it when none runs."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--claim-after",
            type=float,
            default=CLAIM_AFTER_MS / 1000,
            metavar="S",
            help="take over entries that another process has held this long (default: %(default)s)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        client = sync_client()
        try:
            count = drain_once(client, claim_idle_ms=int(options["claim_after"] * 1000))
        finally:
            client.close()
        self.stdout.write(f"{count} records written.")
