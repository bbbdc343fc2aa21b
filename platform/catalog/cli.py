"""Engine settings from a command's options."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandError, CommandParser

from catalog.engine_settings import validate_engine_settings
from catalog.models import ServedModel
from engine.contract.engine_config import SETTINGS
from engine.contract.vllm_flags import BY_NAME, translate_vllm_settings
from engine.text.chat_template import read_template


def find_model(name: str) -> ServedModel:
    """The model with this name, or a `CommandError` that lists the existing ones."""
    model = ServedModel.objects.filter(name=name).first()
    if model is None:
        existing = ", ".join(ServedModel.objects.values_list("name", flat=True)[:20]) or "none yet"
        raise CommandError(f"Model {name!r} not found. Models: {existing}.")
    return model


def add_replica_options(parser: CommandParser) -> None:
    """Add how many replicas of each role a model has; None is no change, or the default."""
    for flags, text in (
        (("--replicas", "--data-parallel-size", "-dp"), "replicas on each node (default: 1)"),
        (
            ("--spares",),
            "hot-standby replicas: loaded, and used only when no other replica serves (default: 0)",
        ),
        (
            ("--prefill-replicas",),
            "of the replicas, those that only compute prompts for the others, by the KV tier that "
            "they share (default: 0)",
        ),
        (
            ("--encode-replicas",),
            "of the replicas, those that only encode pictures and sound for the others, by the KV "
            "tier that they share (default: 0)",
        ),
    ):
        parser.add_argument(*flags, type=int, metavar="N", help=text)


#: Settings for which commands have options of their own.
NAMED = frozenset({"model", "served_model_name"})


def parse_engine_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Validated engine settings from the command line.

    Raises: `ConfigError` (with `param`) for an invalid one.
    """
    names = (SETTINGS | set(BY_NAME)) - NAMED
    values = {name: options[name] for name in names if options.get(name) is not None}
    ours = translate_vllm_settings(values, SETTINGS)
    validate_engine_settings(ours)
    if ours.get("chat_template"):  # as text: a replica on another node doesn't have the file
        ours["chat_template"] = read_template(ours["chat_template"])
    return ours
