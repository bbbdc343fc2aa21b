from typing import Any

from django.core.management.base import CommandParser

from catalog import actions
from catalog.cli import find_model
from catalog.models import ReplicaState
from catalog.rollout import wait_for_state
from common.commands import QuireCommand, add_wait_options
from engine.contract.messages import SLEEP_LEVELS
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = (
        "Release a model's memory (KV cache; on a GPU also weights) until wake_model. The model "
        "must have been loaded with --enable-sleep-mode."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="model name, see list_models")
        parser.add_argument(
            "--level",
            type=int,
            choices=SLEEP_LEVELS,
            default=1,
            help="1 keeps the weights in host memory, 2 reloads them from disk (default: 1)",
        )
        add_wait_options(parser, "return when the model sleeps", timeout_s=120)

    def handle(self, *args: Any, **options: Any) -> None:
        model = find_model(options["name"])
        replicas = actions.sleep_model(actor=CLI_ACTOR, model=model, level=options["level"])
        if options["wait"]:
            wait_for_state(replicas, ReplicaState.SLEEPING, options["timeout"])
            self.stdout.write(f"{model.name} sleeps.")
        else:
            self.stdout.write(f"{model.name} is going to sleep.")
