from __future__ import annotations

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError, CommandParser

from catalog.actions import check_source
from catalog.checkpoint import path_name
from catalog.models import DesiredState, ServedModel
from common.commands import QuireCommand
from common.files import INSTANCE_FILE


class Command(QuireCommand):
    help = (
        "Load a model into the running instance, wait until it is ready, and chat with it in the "
        "terminal. A model that is loaded already answers at once."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the model and an optional question."""
        parser.add_argument("model", help="model name, folder or hub id")
        parser.add_argument("message", nargs="*", help="ask one question and exit")
        parser.add_argument("--name", help="model name in the API (default: folder name)")

    def handle(self, *args: Any, **options: Any) -> None:
        """Load the model, then chat. Raises `CommandError` without a running instance, or if
        another model has the name.
        """
        if not (Path(settings.DATA_DIR) / INSTANCE_FILE).exists():
            raise CommandError(
                f"No instance runs in {settings.DATA_DIR}. `quire up {options['model']}` starts "
                "one with this model; `quire chat` then talks to it."
            )
        source = options["model"]
        name = options["name"] or (
            source if ServedModel.objects.filter(name=source).exists() else path_name(source)
        )
        loaded = ServedModel.objects.filter(name=name, desired_state=DesiredState.LOADED).first()
        if loaded is None:
            call_command("load_model", source, name=name, wait=True)
        elif source != name and check_source(source) != loaded.source:
            raise CommandError(
                f"{name} is loaded from {loaded.source}. Load {source} under another name: --name."
            )
        call_command("chat", *options["message"], model=name)
