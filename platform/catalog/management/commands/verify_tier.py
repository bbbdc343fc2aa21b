from typing import Any

from django.core.management.base import CommandError, CommandParser

from catalog.cli import find_model
from catalog.tiers import verify_tier
from common.commands import QuireCommand
from common.effective_settings import size


class Command(QuireCommand):
    help = (
        "Read all KV blocks of a model's folder or store (kv_offloading_backend) and count "
        "those that were changed. They are never used, and this command changes nothing."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="model in the catalogue")

    def handle(self, *args: Any, **options: Any) -> None:
        report = verify_tier(find_model(options["name"]))
        summary = f"{report.num_records} blocks, {size(report.num_bytes)}"
        if report.failures:
            reasons = ", ".join(f"{count} {reason}" for reason, count in report.failures.items())
            raise CommandError(f"{summary}; can't be used: {reasons}.")
        self.stdout.write(f"{summary}, all as they were written.")
