from typing import Any

from django.core.management.base import CommandError, CommandParser

from common.commands import QuireCommand
from common.installation import PROGRAM
from metering import actions
from metering.models import Budget
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = "Remove a budget. Gateways act on it within seconds."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("id", type=int, help="budget ID, see list_budgets")

    def handle(self, *args: Any, **options: Any) -> None:
        budget = Budget.objects.select_related("tenant", "api_key").filter(pk=options["id"]).first()
        if budget is None:
            raise CommandError(f"Budget {options['id']} not found. See {PROGRAM} list_budgets.")
        actions.delete_budget(actor=CLI_ACTOR, budget=budget)
        self.stdout.write(f"Budget {options['id']} is deleted.")
