from typing import Any

from django.core.management.base import CommandParser

from adapters.access import names_for, unknown_name_warning
from common.command_fields import add_field_options
from common.commands import QuireCommand
from metering import actions
from metering.serializers import BudgetCreateSerializer
from tenants.actors import CLI_ACTOR
from tenants.cli import KEY_HELP, add_tenant_option, find_key, find_tenant


class Command(QuireCommand):
    help = (
        "Limit what a tenant, one of its keys or a model may use in a day, week or month of the "
        "tenant's time zone. Requests are refused, and cut short, before the budget is exceeded. "
        "An existing budget is changed and keeps its spending."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        add_tenant_option(parser)
        parser.add_argument("--key", metavar="KEY", help=f"limit this key only: {KEY_HELP}")
        limits = ("model", "tokens", "amount", "alert_percent")
        add_field_options(parser, BudgetCreateSerializer, *limits, period="per")

    def handle(self, *args: Any, **options: Any) -> None:
        tenant = find_tenant(options["tenant"])
        budget = actions.set_budget(
            actor=CLI_ACTOR,
            tenant=tenant,
            key=find_key(options["key"]) if options["key"] else None,
            model=options["model"],
            period=options["period"],
            tokens=options["tokens"],
            amount=options["amount"],
            alert_percent=options["alert_percent"],
        )
        self.stdout.write(f"Budget {budget.pk} is set: {budget}.")
        if warning := unknown_name_warning(budget.model, names_for(tenant)):
            self.stderr.write(warning)
