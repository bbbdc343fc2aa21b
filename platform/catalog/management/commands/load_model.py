from typing import Any

from django.core.management.base import CommandParser
from django.db import transaction

from catalog import actions
from catalog.checkpoint import path_name
from catalog.cli import NAMED, add_replica_options, parse_engine_settings
from catalog.memory_plan import plan_memory
from catalog.models import ServedModel
from catalog.rollout import wait_until_ready
from common.commands import ProgressBar, QuireCommand, add_wait_options
from common.installation import PROGRAM
from engine.contract.engine_config import add_cli_args
from engine.contract.errors import InvalidRequest
from tenants.actors import CLI_ACTOR
from tenants.cli import find_tenant


class Command(QuireCommand):
    takes_engine_settings = True
    help = (
        f"Load a model and serve it. The supervisor (part of `{PROGRAM} up`, or `{PROGRAM} "
        "supervise`) starts its replicas."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.usage = "%(prog)s source [--name NAME] [--wait] [engine settings]"
        parser.add_argument(
            "source", help="model folder or hub id; or the name of a model that was unloaded"
        )
        parser.add_argument("--name", help="model name in the API (default: folder name)")
        add_replica_options(parser)
        parser.add_argument("--node", metavar="HOST", help="run the replicas only on this host")
        parser.add_argument(
            "--tenant",
            action="append",
            metavar="NAME",
            help="serve the model only to this tenant; repeatable",
        )
        parser.add_argument(
            "--alias",
            action="append",
            metavar="NAME",
            help="additional model name in the API; repeatable",
        )
        parser.add_argument(
            "--fallback",
            action="append",
            metavar="MODEL",
            help="model to use while this one is unavailable; repeatable",
        )
        parser.add_argument(
            "--idle-minutes",
            type=int,
            metavar="N",
            help="stop its replicas after N minutes without a request; the next one starts them "
            "again",
        )
        add_wait_options(parser, "return when the model answers requests", timeout_s=600)
        add_cli_args(parser, skip=NAMED | {"data_parallel_size"})

    def handle(self, *args: Any, **options: Any) -> None:
        source, name = options["source"], options["name"]
        is_registered = ServedModel.objects.filter(name=source).exists()
        settings = parse_engine_settings(options)
        tenants = [find_tenant(slug) for slug in options["tenant"] or []]
        served_name = name or (source if is_registered else path_name(source))
        existing = ServedModel.objects.filter(name=served_name).first()
        failure = actions.last_failure(existing) if existing is not None else ""
        with transaction.atomic():
            model = actions.load_model(
                actor=CLI_ACTOR,
                name=served_name,
                source="" if is_registered and name in (None, source) else source,
                settings=settings if settings or not is_registered else None,
                num_replicas=options["replicas"],
                num_spares=options["spares"],
                num_prefill=options["prefill_replicas"],
                num_encode=options["encode_replicas"],
                node=options["node"],
                aliases=options["alias"],
                fallbacks=options["fallback"],
                idle_minutes=options["idle_minutes"],
            )
            if tenants:
                actions.share_model(actor=CLI_ACTOR, model=model, tenants=tenants, public=False)
            self._show_plan(model)
        if failure:
            reason = failure.removesuffix(".")
            self.print_hint(f"{model.name} could not be loaded before ({reason}). Trying again.")
        if options["wait"]:
            with ProgressBar() as bar:

                def say(text: str) -> None:
                    bar.clear()
                    self.print_hint(text)

                on_fraction = bar.show if bar.is_visible else None
                wait_until_ready(model, options["timeout"], say, on_fraction)
            self.stdout.write(f"{model.name} is ready.")
        else:
            self.stdout.write(f"{model.name} is being loaded. See {PROGRAM} list_models.")

    def _show_plan(self, model: ServedModel) -> None:
        """Print the memory estimate, if it's known. Raises `InvalidRequest` if they can't fit."""
        plan = plan_memory(model)
        if plan is None:
            return
        if not plan.fits:
            raise InvalidRequest(
                f"{model.name} can't fit into memory: {plan.text}. Use fewer bits (quantization), "
                "fewer replicas or another machine.",
                param="source",
            )
        self.print_hint(f"{plan.text}.")
