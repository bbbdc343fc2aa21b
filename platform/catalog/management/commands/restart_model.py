from typing import Any

from django.core.management.base import CommandParser

from catalog.cli import find_model
from catalog.rollout import rolling_restart
from common.commands import QuireCommand, add_wait_options
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = (
        "Restart a model's replicas one by one: each finishes its streams and restarts before "
        "the next. With several replicas there is no interruption."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="model name, see list_models")
        add_wait_options(
            parser,
            "return when the last replica is ready",
            timeout_s=600,
            timeout_help="maximum seconds for each replica",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        model = find_model(options["name"])
        wait = options["wait"]
        rolling_restart(
            actor=CLI_ACTOR,
            model=model,
            timeout=options["timeout"],
            wait=wait,
            on_progress=self.print_hint,
        )
        self.stdout.write(
            f"{model.name} is restarted." if wait else f"{model.name} is being restarted."
        )
