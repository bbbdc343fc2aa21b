from typing import Any

from django.core.management.base import CommandError, CommandParser

from common.commands import QuireCommand
from common.installation import PROGRAM
from metering import actions
from metering.budgets import access_prices
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = "Delete a price by which nothing was billed, such as a future or a misspelt one."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("id", type=int, help="price ID, see list_prices")

    def handle(self, *args: Any, **options: Any) -> None:
        price = access_prices().filter(pk=options["id"]).first()
        if price is None:
            raise CommandError(f"Price {options['id']} not found. See {PROGRAM} list_prices.")
        actions.delete_price(actor=CLI_ACTOR, price=price)
        self.stdout.write(f"Price {options['id']} is deleted.")
