from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from metering.budgets import BudgetState, access_budgets, states_of
from metering.money import amount_text
from tenants.actors import CLI_ACTOR
from tenants.cli import find_tenant
from tenants.models import Tenant


class Command(QuireCommand):
    help = "List budgets with their usage in the current day, week or month."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", metavar="NAME", help="list budgets of this tenant only")

    def handle(self, *args: Any, **options: Any) -> None:
        named = options["tenant"]
        tenants = [find_tenant(named)] if named else Tenant.objects.filter(budgets__isnull=False)
        states = [
            state
            for tenant in dict.fromkeys(tenants)
            for state in states_of(list(access_budgets(CLI_ACTOR, tenant)))
        ]
        head = ("ID", "TENANT", "KEY", "MODEL", "PER", "TOKENS", "OF", "AMOUNT", "OF", "ENDS (UTC)")
        self.table(head, [row(state) for state in states])


def row(state: BudgetState) -> tuple[object, ...]:
    """A budget's line."""
    budget = state.budget
    return (
        budget.pk,
        budget.tenant,
        budget.api_key.prefix if budget.api_key else "all",
        budget.model or "all",
        budget.period,
        state.tokens,
        "-" if budget.tokens is None else budget.tokens,
        amount_text(state.nanos),
        "-" if budget.amount is None else f"{budget.amount.normalize():f}",
        f"{state.end:%Y-%m-%d %H:%M}",
    )
