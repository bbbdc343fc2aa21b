"""`manage.py unload_model NAME`."""

from typing import Any

from django.core.management.base import CommandParser

from catalog import actions
from catalog.cli import find_model
from catalog.rollout import wait_until_gone
from common.commands import QuireCommand
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    """Stop serving a model."""

    help = "Stop serving a model: its replicas finish their streams and end."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="model name, see list_models")
        parser.add_argument(
            "--wait", action="store_true", help="return when its replicas have ended"
        )
        parser.add_argument(
            "--timeout",
            type=float,
            default=120,
            metavar="S",
            help="seconds for --wait (default: 120)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Set the desired state; wait if requested."""
        model = actions.unload_model(actor=CLI_ACTOR, model=find_model(options["name"]))
        if options["wait"]:
            wait_until_gone(model, options["timeout"])
            self.stdout.write(f"{model.name} is unloaded.")
        else:
            self.stdout.write(f"{model.name} is being unloaded.")
