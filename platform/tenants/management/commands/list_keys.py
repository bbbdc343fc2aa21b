from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from tenants.cli import find_tenant
from tenants.models import ApiKey


class Command(QuireCommand):
    help = "List API keys by their prefixes; the keys themselves can't be shown again."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", metavar="NAME", help="list keys of this tenant only")
        parser.add_argument("--all", action="store_true", help="include revoked and expired keys")

    def handle(self, *args: Any, **options: Any) -> None:
        keys = ApiKey.objects.select_related("tenant")
        if options["tenant"]:
            keys = keys.filter(tenant=find_tenant(options["tenant"]))
        rows = [
            (key.public_id, key.prefix, key.tenant, key.name, key.state(), *times(key))
            for key in keys
            if options["all"] or key.state() == "active"
        ]
        self.table(("ID", "KEY", "TENANT", "NAME", "STATE", "CREATED", "LAST USED"), rows)


def times(key: ApiKey) -> tuple[str, str]:
    """When it was created and last used."""
    used = f"{key.last_used_at:%Y-%m-%d %H:%M}" if key.last_used_at else "never"
    return f"{key.created_at:%Y-%m-%d %H:%M}", used
