from typing import Any

from django.core.management.base import CommandParser

from catalog.cli import find_model
from catalog.tiers import drop_tier
from common.commands import QuireCommand
from common.effective_settings import size
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = (
        "Delete all KV blocks of a model's folder or store (kv_offloading_backend). Its "
        "replicas go on with an empty one."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="model in the catalogue")

    def handle(self, *args: Any, **options: Any) -> None:
        report = drop_tier(actor=CLI_ACTOR, model=find_model(options["name"]))
        deleted = size(report.num_bytes) if report.num_bytes else f"{report.num_records} blocks"
        self.stdout.write(f"Deleted: {deleted}.")
