from typing import Any

from django.core.management.base import CommandError, CommandParser

from common.commands import QuireCommand
from common.installation import PROGRAM
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import add_limit_options, limits_of, warn_of_unknown_models
from tenants.models import User


class Command(QuireCommand):
    help = "Create a tenant, the owner of requests, cache, limits and costs. See create_key."

    def add_arguments(self, parser: CommandParser) -> None:
        name = parser.add_mutually_exclusive_group(required=True)
        name.add_argument("name", nargs="?", help="display name, such as 'Acme Inc'")
        name.add_argument("--name", dest="name_given", metavar="NAME", help="same as NAME")
        parser.add_argument("--slug", default="", help="short name (default: from the name)")
        parser.add_argument("--owner", metavar="USERNAME", help="user who becomes its owner")
        add_limit_options(parser, defaults=True)

    def handle(self, *args: Any, **options: Any) -> None:
        owner = None
        if options["owner"]:
            owner = User.objects.filter(username=options["owner"]).first()
            if owner is None:
                raise CommandError(f"User {options['owner']!r} not found.")
        tenant = actions.create_tenant(
            actor=CLI_ACTOR,
            name=options["name_given"] or options["name"],
            slug=options["slug"],
            owner=owner,
            **limits_of(options),
        )
        self.stdout.write(tenant.slug)
        warn_of_unknown_models(self, tenant, options["allowed_models"] or [])
        self.print_hint(f"Its first key: {PROGRAM} create_key --tenant {tenant.slug}")
