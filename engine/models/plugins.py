"""Installed packages that bring models: entry points, read once a process.

- Group `quire.models`: the entry point's name is an architecture, its value "package.module:Class".
  It is registered as by `ModelRegistry.register_model`, and imported when a checkpoint names it.
- Group `quire.general_plugins`: a function that is called with no arguments before the first model
  is loaded; it may register whatever it likes.

QUIRE_PLUGINS, where it is set, names those that are wanted, with commas between; "" means none.
"""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint

from engine.contract.errors import ConfigError
from engine.contract.plugins import wanted

log = logging.getLogger(__name__)

MODELS = "quire.models"
GENERAL = "quire.general_plugins"
_loaded: set[tuple[str, str, str]] = set()


def load_plugins() -> None:
    """Register and call what is installed and not loaded yet.

    Raises `ConfigError` for a plugin that fails: a replica that lacks one would be a puzzle later.
    """
    from engine.models.registry import ModelRegistry

    for point in _wanted(MODELS):
        ModelRegistry.register_model(point.name, point.value)
    for point in _wanted(GENERAL):
        try:
            point.load()()
        except Exception as error:
            raise ConfigError(
                f"The plugin {point.name} ({point.value}) failed: {type(error).__name__}: {error}",
                param="QUIRE_PLUGINS",
            ) from error
        log.info("Plugin %s (%s) loaded", point.name, point.value)


def _wanted(group: str) -> list[EntryPoint]:
    """The group's entry points that weren't loaded before."""
    found = []
    for point in wanted(group):
        key = (group, point.name, point.value)
        if key not in _loaded:
            _loaded.add(key)
            found.append(point)
    return found
