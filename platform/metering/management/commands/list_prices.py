"""`manage.py list_prices`."""

from typing import Any

from django.conf import settings
from django.core.management.base import CommandParser

from common.commands import QuireCommand
from metering.budgets import access_prices


class Command(QuireCommand):
    """List prices."""

    help = "List prices for a million tokens, each model's newest first."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--model", metavar="MODEL", help="list prices of this model only")

    def handle(self, *args: Any, **options: Any) -> None:
        """Print a table."""
        prices = access_prices()
        if options["model"]:
            prices = prices.filter(model=options["model"])
        rows = [
            (
                price.pk,
                price.model,
                f"{price.valid_from:%Y-%m-%d %H:%M}",
                *(
                    f"{value.normalize():f}"
                    for value in (
                        price.input_per_million,
                        price.cached_per_million,
                        price.output_per_million,
                    )
                ),
            )
            for price in prices
        ]
        self.table(
            (
                "ID",
                "MODEL",
                "FROM (UTC)",
                "INPUT",
                "CACHED",
                f"OUTPUT ({settings.QUIRE.currency})",
            ),
            rows,
        )
