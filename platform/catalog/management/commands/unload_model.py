from typing import Any

from django.core.management.base import CommandParser

from catalog import actions
from catalog.cli import find_model
from catalog.rollout import wait_until_gone
from common.commands import QuireCommand, add_wait_options
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = "Stop serving a model: its replicas finish their streams and end."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="model name, see list_models")
        add_wait_options(parser, "return when its replicas have ended", timeout_s=120)

    def handle(self, *args: Any, **options: Any) -> None:
        model = actions.unload_model(actor=CLI_ACTOR, model=find_model(options["name"]))
        if options["wait"]:
            wait_until_gone(model, options["timeout"])
            self.stdout.write(f"{model.name} is unloaded.")
        else:
            self.stdout.write(f"{model.name} is being unloaded.")
