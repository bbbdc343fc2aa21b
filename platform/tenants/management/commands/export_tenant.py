"""`manage.py export_tenant --tenant NAME FILE`."""

from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from common.commands import QuireCommand
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import find_tenant
from tenants.tenant_data import export_file


class Command(QuireCommand):
    """Write all that is kept of a tenant into a ZIP archive."""

    help = "Export all data of a tenant to a ZIP archive."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--tenant", required=True, metavar="NAME", help="tenant slug, see list_tenants"
        )
        parser.add_argument("file", metavar="FILE", help="path of the new archive; must not exist")

    def handle(self, *args: Any, **options: Any) -> None:
        """Write it."""
        tenant, path = find_tenant(options["tenant"]), Path(options["file"])
        actions.log_export(actor=CLI_ACTOR, tenant=tenant)
        try:
            size = export_file(tenant, path)
        except OSError as error:
            raise CommandError(f"{path} can't be written: {error}") from error
        self.stdout.write(f"{path}: {size:,} bytes")
