from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from metering import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import find_tenant


class Command(QuireCommand):
    help = (
        "Set the webhook URL of a tenant, which receives budget alerts, or of operators, which "
        "receives the alerts of the console, and print the signing secret once. Private "
        "addresses need QUIRE_EGRESS_NETWORKS."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        owner = parser.add_mutually_exclusive_group(required=True)
        owner.add_argument("--tenant", metavar="NAME", help="tenant slug, see list_tenants")
        owner.add_argument("--operators", action="store_true", help="the operators' webhook")
        where = parser.add_mutually_exclusive_group(required=True)
        where.add_argument("url", nargs="?", metavar="URL", help="https://...")
        where.add_argument("--off", action="store_true", help="remove the webhook")

    def handle(self, *args: Any, **options: Any) -> None:
        tenant = None if options["operators"] else find_tenant(options["tenant"])
        if options["off"]:
            actions.delete_webhook(actor=CLI_ACTOR, tenant=tenant)
            self.stdout.write(f"{tenant or 'operators'}: no webhook any more.")
            return
        hook = actions.set_webhook(actor=CLI_ACTOR, tenant=tenant, url=options["url"])
        self.stdout.write(hook.secret)
