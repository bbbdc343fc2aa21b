from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from adapters.models import Adapter
from common.commands import QuireCommand
from tenants.cli import find_tenant


class Command(QuireCommand):
    help = "List LoRA adapters: their versions, and the version that each name leads to."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", metavar="NAME", help="list adapters of this tenant only")

    def handle(self, *args: Any, **options: Any) -> None:
        rows = Adapter.objects.select_related("tenant", "served_model").order_by("tenant", "name")
        if options["tenant"]:
            rows = rows.filter(tenant=find_tenant(options["tenant"]))
        lines, problems = [], []
        for adapter in rows.prefetch_related("versions", "aliases"):
            for version in adapter.versions.all():
                lines.append(
                    (
                        str(adapter),
                        adapter.owner or "everyone",
                        version.number,
                        version.state,
                        answers(adapter, version.pk),
                        "yes" if adapter.pinned else "-",
                        version.rank or "?",
                        version.num_bytes,
                        version.short_digest or "?",
                    )
                )
                if version.problem:
                    problems.append(f"{version}: {version.problem}")
        head = (
            "ADAPTER",
            "OF",
            "VERSION",
            "STATE",
            "ANSWERS AS",
            "PINNED",
            "RANK",
            "BYTES",
            "DIGEST",
        )
        self.table(head, lines)
        for problem in problems:
            self.print_hint(problem)


def answers(adapter: Adapter, version: int) -> str:
    """Such as `tone` or `tone (10 %)`."""
    texts = []
    for alias in adapter.aliases.all():
        if alias.version_id == version:
            share = f" ({100 - alias.canary_percent} %)" if alias.canary_id else ""
            texts.append(f"{alias.name}{share}")
        elif alias.canary_id == version:
            texts.append(f"{alias.name} ({alias.canary_percent} %)")
    return ", ".join(texts) or "-"
