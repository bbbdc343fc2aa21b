from typing import Any

from django.conf import settings
from django.core.management.base import CommandParser

from common.commands import QuireCommand
from metering.budgets import access_prices
from metering.models import PRICE_FIELDS


class Command(QuireCommand):
    help = "List prices of tokens, images and audio, each model's newest first."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--model", metavar="MODEL", help="list prices of this model only")

    def handle(self, *args: Any, **options: Any) -> None:
        prices = access_prices()
        if options["model"]:
            prices = prices.filter(model=options["model"])
        rows = [
            (
                price.pk,
                price.model,
                f"{price.valid_from:%Y-%m-%d %H:%M}",
                *(f"{getattr(price, name).normalize():f}" for name in PRICE_FIELDS),
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
                "OUTPUT",
                "IMAGE",
                f"MINUTE OF AUDIO ({settings.QUIRE.currency})",
            ),
            rows,
        )
