"""Engine settings from a command's options."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from engine.config import EngineConfig

#: Commands have words of their own for these.
NAMED = frozenset({"model", "served_model_name"})


def given_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The engine settings that were given on the command line, checked.

    Raises: `ConfigError` (with `param`) for one out of its range.
    """
    names = {spec.name for spec in dataclasses.fields(EngineConfig)} - NAMED
    given = {name: options[name] for name in names if options.get(name) is not None}
    EngineConfig.from_mapping(given)
    return given
