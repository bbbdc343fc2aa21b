from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import transaction

from common.commands import QuireCommand
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import add_limit_options, find_tenant, limits_of, warn_of_unknown_models


class Command(QuireCommand):
    help = (
        "Change a tenant's name or limits, or disable and enable it. Options that are not given "
        "stay unchanged. Gateways apply the change within seconds."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("tenant", metavar="NAME", help="tenant slug, see list_tenants")
        parser.add_argument("--name", metavar="TEXT", help="display name of the tenant")
        switch = parser.add_mutually_exclusive_group()
        switch.add_argument(
            "--off",
            action="store_true",
            help="disable the tenant: keys and members are rejected, running streams end",
        )
        switch.add_argument("--on", action="store_true", help="enable the tenant")
        add_limit_options(parser, defaults=False)

    def handle(self, *args: Any, **options: Any) -> None:
        changes = limits_of(options)
        if options["name"] is not None:
            changes["name"] = options["name"]
        if not (changes or options["off"] or options["on"]):
            raise CommandError("Nothing to change: name a limit, --name, --off or --on.")
        with transaction.atomic():
            tenant = find_tenant(options["tenant"])
            if changes:
                tenant = actions.update_tenant(actor=CLI_ACTOR, tenant=tenant, **changes)
            if options["off"] or options["on"]:
                actions.set_tenant_active(actor=CLI_ACTOR, tenant=tenant, active=not options["off"])
        self.stdout.write(f"{tenant.slug} is changed.")
        warn_of_unknown_models(self, tenant, options["allowed_models"] or [])
