from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from adapters import actions, version_jobs
from adapters.models import WORKING, AdapterVersion, VersionState
from catalog.cli import find_model
from common.commands import ProgressBar, QuireCommand
from common.installation import PROGRAM
from engine.contract.hub_files import resolve_source
from tenants.actors import CLI_ACTOR
from tenants.cli import find_tenant


class Command(QuireCommand):
    help = (
        "Add a LoRA adapter, or its next version. It is checked against its model before it can "
        "answer."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("source", help="folder, .gguf file, or owner/name of the hub")
        parser.add_argument(
            "--model", required=True, metavar="NAME", help="base model of the adapter"
        )
        parser.add_argument("--name", help="adapter name in the API (default: folder name)")
        parser.add_argument(
            "--tenant", metavar="NAME", help="owning tenant (default: shared with all tenants)"
        )
        parser.add_argument(
            "--description", default="", metavar="TEXT", help="description in the console"
        )
        parser.add_argument(
            "--no-promote", action="store_true", help="don't promote the new version to live"
        )
        parser.add_argument(
            "--no-wait", action="store_true", help="return at once; a worker validates the version"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        source = options["source"]
        path = Path(source).expanduser()
        common: dict[str, Any] = {
            "actor": CLI_ACTOR,
            "tenant": find_tenant(options["tenant"]) if options["tenant"] else None,
            "served_model": find_model(options["model"]),
            "name": options["name"] or resolve_source(path).name.removesuffix(".gguf"),
            "description": options["description"],
            "promote": not options["no_promote"],
        }
        if _is_path(source, path):
            with ProgressBar("Upload") as bar:
                version = actions.add_from_folder(
                    path=str(path.absolute()), on_progress=bar.show, **common
                )
        else:
            version = actions.add_from_hub(repository=source, **common)
        if options["no_wait"]:
            self.stdout.write(f"{version} waits for its check. See {PROGRAM} list_adapters.")
            return
        self.print_hint(f"Checking {version} ...")
        self._tell(finished(version))

    def _tell(self, version: AdapterVersion) -> None:
        if version.state == VersionState.FAILED:
            raise CommandError(f"{version} is refused: {version.problem}")
        live = "live" if version.state == VersionState.LIVE else "ready"
        self.stdout.write(f"{version} is {live}: {version.digest}")


def _is_path(source: str, path: Path) -> bool:
    """Whether the source is local, not on the hub. Raises `CommandError` if it is neither."""
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return True
    if path.is_file():
        raise CommandError(f"{source} is a file: name the folder that holds it, or a .gguf file.")
    if source.startswith(("/", ".", "~")):
        raise CommandError(f"There is no folder or .gguf file {source}.")
    if source.count("/") != 1:
        raise CommandError(
            f"There is no folder or .gguf file {source}, and a repository of the hub is "
            "owner/name or owner/name@revision."
        )
    return False


def finished(version: AdapterVersion) -> AdapterVersion:
    """The version after its check, here or in a worker that was faster."""
    while version.state in WORKING:
        version_jobs.process_version(version.pk)
        version.refresh_from_db()
        if version.state in WORKING:
            time.sleep(0.2)
    return version
