from typing import Any

from django.core.management.base import CommandParser

from catalog import actions
from catalog.cli import find_model
from catalog.models import ReplicaState
from catalog.rollout import wait_for_state
from common.commands import QuireCommand, add_wait_options
from engine.contract.messages import SLEEP_TAGS
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = "Wake a sleeping model: it allocates its memory again and serves."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="model name, see list_models")
        parser.add_argument(
            "--tags", nargs="+", choices=SLEEP_TAGS, default=[], help="parts to wake (default: all)"
        )
        add_wait_options(parser, "return when the model answers requests", timeout_s=600)

    def handle(self, *args: Any, **options: Any) -> None:
        model = find_model(options["name"])
        replicas = actions.wake_model(actor=CLI_ACTOR, model=model, tags=options["tags"])
        if options["wait"]:
            wait_for_state(replicas, ReplicaState.READY, options["timeout"])
            self.stdout.write(f"{model.name} is ready.")
        else:
            self.stdout.write(f"{model.name} is waking up.")
