import os
import socket
from typing import Any

from django.conf import settings
from django.core.management.base import CommandParser

from catalog import actions
from catalog.checkpoint import path_name
from catalog.cli import NAMED, parse_engine_settings
from catalog.engine_settings import replica_command
from catalog.models import DesiredState, ServedModel
from common.commands import QuireCommand
from common.errors import Conflict
from engine.contract.engine_config import add_cli_args
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    takes_engine_settings = True
    help = (
        "Run one replica of a model here, in the foreground, until Ctrl-C. It joins the gateways "
        "through Redis (REDIS_URL). It isn't restarted when it exits."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.usage = "%(prog)s model_or_name [--name NAME] [engine settings]"
        parser.add_argument("model_or_name", help="a model's name in the catalogue, or a folder")
        parser.add_argument("--name", help="model name in the API (default: folder name)")
        parser.add_argument(
            "--replica-id", help="unique replica ID (default: from model, host and process)"
        )
        parser.add_argument(
            "--health-port",
            type=int,
            metavar="PORT",
            help="answer GET /live, /ready and /metrics over HTTP at this port (default: don't)",
        )
        parser.add_argument(
            "--endpoint",
            default="",
            metavar="HOST:PORT",
            help="address of the gateway in this replica's pod, which endpoint pickers then pick "
            "for its model (default: none)",
        )
        parser.add_argument(
            "--idle-minutes",
            type=int,
            default=0,
            metavar="N",
            help="an autoscaler ends replicas after N minutes without requests: with none left, "
            "requests wait until it has started one (default: 0, there is none)",
        )
        add_cli_args(parser, skip=NAMED)

    def handle(self, *args: Any, **options: Any) -> None:
        """Register the model in the catalogue, then exec the engine's process."""
        model = self._model(options)
        replica_id = options["replica_id"] or f"{model.pk}-{socket.gethostname()}-{os.getpid()}"
        command = replica_command(
            {**model.engine_settings, **parse_engine_settings(options)},
            replica_id=replica_id,
            key_prefix=settings.QUIRE.key_prefix,
            drain_seconds=settings.QUIRE.drain_seconds,
            health_port=options["health_port"],
            endpoint=options["endpoint"],
            program=settings.QUIRE.engine_command,
        )
        self.print_hint(f"Replica {replica_id} of {model.name}; Ctrl-C drains and ends it.")
        os.chdir(settings.BASE_DIR)
        environment = {**os.environ, "REDIS_URL": settings.REDIS_URL}
        os.execvpe(command[0], command, environment)  # noqa: S606 - our own Python

    def _model(self, options: dict[str, Any]) -> ServedModel:
        """The catalogue's row; a new one is unmanaged, so that no supervisor starts it."""
        argument = options["model_or_name"]
        name = options["name"] or argument
        served_model = ServedModel.objects.filter(name=name).first()
        if served_model is None and options["name"] is None:
            name = path_name(argument)
            served_model = ServedModel.objects.filter(name=name).first()
        idle_minutes = options["idle_minutes"]
        if served_model is not None and served_model.desired_state == DesiredState.LOADED:
            if served_model.managed and not idle_minutes:
                return served_model
            return actions.update_model(
                actor=CLI_ACTOR, model=served_model, idle_minutes=idle_minutes
            )
        try:
            return actions.load_model(
                actor=CLI_ACTOR,
                name=name,
                source="" if served_model is not None else argument,
                managed=False,
                idle_minutes=idle_minutes,
            )
        except Conflict:
            # Of replicas that start at the same time, one registers the model.
            loaded = ServedModel.objects.filter(name=name, desired_state=DesiredState.LOADED)
            if (model := loaded.first()) is None:
                raise
            return model
