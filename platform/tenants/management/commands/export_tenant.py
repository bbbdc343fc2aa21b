from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from common.commands import QuireCommand
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import add_tenant_option, find_tenant
from tenants.tenant_data import export_file


class Command(QuireCommand):
    help = "Export all data of a tenant to a ZIP archive."

    def add_arguments(self, parser: CommandParser) -> None:
        add_tenant_option(parser)
        parser.add_argument("file", metavar="FILE", help="path of the new archive; must not exist")

    def handle(self, *args: Any, **options: Any) -> None:
        tenant, path = find_tenant(options["tenant"]), Path(options["file"])
        actions.log_export(actor=CLI_ACTOR, tenant=tenant)
        try:
            size = export_file(tenant, path)
        except OSError as error:
            raise CommandError(f"{path} can't be written: {error}") from error
        self.stdout.write(f"{path}: {size:,} bytes")
