from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand, comma_list, parse_expiry
from tenants import actions, api_keys
from tenants.actors import CLI_ACTOR
from tenants.cli import (
    COUNT,
    add_media_limits,
    add_tenant_option,
    find_account,
    find_tenant,
    warn_of_unknown_models,
)


class Command(QuireCommand):
    help = "Create an API key and print it. The key is shown only once; only its hash is stored."

    def add_arguments(self, parser: CommandParser) -> None:
        add_tenant_option(parser)
        parser.add_argument("--name", default="", help="purpose of the key")
        parser.add_argument(
            "--scopes",
            metavar="A,B",
            help=f"of {', '.join(sorted(api_keys.ALL))} "
            f"(default: {','.join(sorted(api_keys.DEFAULT))})",
        )
        parser.add_argument(
            "--expires", metavar="WHEN", help="90d, 12h, 30m, or a date (default: never)"
        )
        default = " (default: the tenant's limit)"
        requests = f"requests per minute of this key{default}"
        parser.add_argument("--requests-per-minute", help=requests, **COUNT)
        tokens = f"tokens per minute, prompt plus output{default}"
        parser.add_argument("--tokens-per-minute", help=tokens, **COUNT)
        add_media_limits(parser, default)
        running = f"maximum concurrent requests of this key{default}"
        parser.add_argument("--max-running-requests", help=running, **COUNT)
        context = f"maximum tokens of a request, prompt plus output{default}"
        parser.add_argument("--max-context-tokens", help=context, **COUNT)
        words: dict[str, Any] = {"type": comma_list, "default": [], "metavar": "A,B"}
        models = "models that the key may use (default: all of the tenant's)"
        parser.add_argument("--allowed-models", help=models, **words)
        endpoints = "paths that the key may call, such as /v1/embeddings (default: all)"
        parser.add_argument("--endpoints", help=endpoints, **words)
        addresses = "addresses that the key may be used from, such as 10.0.0.0/8 (default: any)"
        parser.add_argument("--addresses", help=addresses, **words)
        parser.add_argument(
            "--service-account",
            metavar="NAME",
            help="service account that holds the key (default: the tenant itself)",
        )
        parser.add_argument("--plain", action="store_true", help="print the key and nothing else")

    def handle(self, *args: Any, **options: Any) -> None:
        requested_scopes, program = options["scopes"], options["service_account"]
        tenant = find_tenant(options["tenant"])
        created = actions.create_key(
            actor=CLI_ACTOR,
            tenant=tenant,
            service_account=find_account(tenant, program) if program else None,
            name=options["name"],
            scopes=None
            if requested_scopes is None
            else [word.strip() for word in requested_scopes.split(",")],
            expires_at=parse_expiry(options["expires"]) if options["expires"] else None,
            **{name: options[name] for name in actions.KEY_LIMIT_FIELDS},
        )
        self.stdout.write(created.secret)
        warn_of_unknown_models(self, tenant, options["allowed_models"])
        if not options["plain"]:
            until = created.key.expires_at
            self.print_hint(
                f"A key of {created.key.tenant} for {', '.join(created.key.scopes)}"
                f"{f', until {until:%Y-%m-%d %H:%M} UTC' if until else ''}. "
                "Keep it now: it can't be shown again."
            )
