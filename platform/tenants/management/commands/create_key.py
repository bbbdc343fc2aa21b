from typing import Any

from django.core.management.base import CommandParser

from common.command_fields import add_field_options
from common.commands import QuireCommand, parse_expiry
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import (
    add_tenant_option,
    find_account,
    find_tenant,
    warn_of_unknown_models,
)
from tenants.serializers import ApiKeyCreateSerializer

FIELDS = ("name", "scopes", *actions.KEY_LIMIT_FIELDS)


class Command(QuireCommand):
    help = "Create an API key and print it. The key is shown only once; only its hash is stored."

    def add_arguments(self, parser: CommandParser) -> None:
        add_tenant_option(parser)
        add_field_options(parser, ApiKeyCreateSerializer, *FIELDS)
        parser.add_argument(
            "--expires", metavar="WHEN", help="90d, 12h, 30m, or a date (default: never)"
        )
        parser.add_argument(
            "--service-account",
            metavar="NAME",
            help="service account that holds the key (default: the tenant itself)",
        )
        parser.add_argument("--plain", action="store_true", help="print the key and nothing else")

    def handle(self, *args: Any, **options: Any) -> None:
        program = options["service_account"]
        tenant = find_tenant(options["tenant"])
        created = actions.create_key(
            actor=CLI_ACTOR,
            tenant=tenant,
            service_account=find_account(tenant, program) if program else None,
            expires_at=parse_expiry(options["expires"]) if options["expires"] else None,
            **{name: options[name] for name in FIELDS},
        )
        self.stdout.write(created.secret)
        warn_of_unknown_models(self, tenant, options["allowed_models"] or ())
        if not options["plain"]:
            until = created.key.expires_at
            self.print_hint(
                f"A key of {created.key.tenant} for {', '.join(created.key.scopes)}"
                f"{f', until {until:%Y-%m-%d %H:%M} UTC' if until else ''}. "
                "Keep it now: it can't be shown again."
            )
