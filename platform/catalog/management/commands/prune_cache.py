import shutil
import time
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.template.defaultfilters import filesizeformat

from common.commands import QuireCommand, parse_span
from engine.system.cache_folder import cache_dir


class Command(QuireCommand):
    needs_database = False
    help = (
        "Delete weights that were converted from PyTorch's files (.bin), in QUIRE_CACHE_DIR, and "
        "haven't been loaded for a while. Those that are needed again are converted again."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--unused-for",
            default="30d",
            metavar="SPAN",
            help="time since they were last loaded: 30d, 12h, 30m, or 0 for all "
            "(default: %(default)s)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        span = parse_span(options["unused_for"])
        if span is None:
            raise CommandError(
                f"--unused-for must be 30d, 12h, 30m or 0; got {options['unused_for']!r}."
            )
        folder = cache_dir() / "weights"
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        num_freed_bytes = 0
        for entry in entries:
            try:
                # A folder's modification time is that of its last load: see `converted_files`.
                if time.time() - entry.stat().st_mtime < span.total_seconds():
                    continue
                num_bytes = sum(path.stat().st_size for path in entry.rglob("*") if path.is_file())
                shutil.rmtree(entry)
            except OSError as error:
                raise CommandError(f"{entry} can't be deleted: {error.strerror}.") from error
            num_freed_bytes += num_bytes
            self.stdout.write(f"{entry}  {filesizeformat(num_bytes)}")
        self.stdout.write(f"{filesizeformat(num_freed_bytes)} freed.")
