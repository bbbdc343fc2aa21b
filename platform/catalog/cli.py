"""Engine settings from a command's options."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandError

from catalog.engine_settings import validate_engine_settings
from catalog.models import ServedModel
from engine.contract.engine_config import SETTINGS
from engine.contract.vllm_flags import BY_NAME, translate_vllm_settings
from engine.text.chat_template import read_template


def find_model(name: str) -> ServedModel:
    """The model, or a `CommandError` that names those there are."""
    model = ServedModel.objects.filter(name=name).first()
    if model is None:
        existing = ", ".join(ServedModel.objects.values_list("name", flat=True)[:20]) or "none yet"
        raise CommandError(f"Model {name!r} not found. Models: {existing}.")
    return model


#: Commands have words of their own for these.
NAMED = frozenset({"model", "served_model_name"})


def parse_engine_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The engine settings that were given on the command line, checked.

    Raises: `ConfigError` (with `param`) for one that can't be used.
    """
    names = (SETTINGS | set(BY_NAME)) - NAMED
    values = {name: options[name] for name in names if options.get(name) is not None}
    ours = translate_vllm_settings(values, SETTINGS)
    validate_engine_settings(ours)
    if ours.get("chat_template"):  # its text: a replica elsewhere has no such file
        ours["chat_template"] = read_template(ours["chat_template"])
    return ours
