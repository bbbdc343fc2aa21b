from typing import Any

from django.core.management.base import CommandParser

from catalog import actions
from catalog.cli import find_model
from common.commands import QuireCommand
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = (
        "Delete an unloaded model from the catalogue, with its settings. Its files and its usage "
        "stay."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="model name, see list_models")

    def handle(self, *args: Any, **options: Any) -> None:
        model = find_model(options["name"])
        actions.delete_model(actor=CLI_ACTOR, model=model)
        self.stdout.write(f"{model.name} is out of the catalogue.")
