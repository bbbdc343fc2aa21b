from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.template.defaultfilters import filesizeformat

from catalog.hub import download_model, get_download_info
from common.commands import QuireCommand


class Command(QuireCommand):
    needs_database = False
    help = (
        "Download a model from the hub to this host, so that loading it needs no network. HF_TOKEN "
        "gives access to gated models. An interrupted download continues where it stopped."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """The repository and its revision."""
        parser.add_argument("repository", help="hub id, such as Qwen/Qwen3-0.6B")
        parser.add_argument("--revision", help="branch, tag or commit (default: main)")
        parser.add_argument("--download-dir", metavar="DIR", help="(default: the hub's own cache)")

    def handle(self, *args: Any, **options: Any) -> None:
        names = ("revision", "download_dir")
        settings = {name: options[name] for name in names if options[name]}
        download = get_download_info(options["repository"], settings)
        if not download.fits:
            raise CommandError(
                f"{options['repository']} needs {filesizeformat(download.nbytes)}; "
                f"{filesizeformat(download.free_bytes)} are free."
            )
        self.print_hint(
            f"{options['repository']}: {filesizeformat(download.nbytes)}, of which "
            f"{filesizeformat(download.cached_bytes)} are on this host."
        )
        self.stdout.write(str(download_model(options["repository"], settings)))
