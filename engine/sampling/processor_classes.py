"""Which classes of logits processors an engine has: of packages, and of its settings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from engine.contract.config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.plugins import loaded, wanted
from engine.sampling.logits_processor import LogitsProcessor

log = logging.getLogger(__name__)
GROUP = "quire.logits_processors"


def processor_classes(config: EngineConfig, *, pools: bool) -> list[type[LogitsProcessor]]:
    """Those that installed packages name, then those of `logits_processors`.

    `pools`: the model gives vectors, labels or scores, and chooses no tokens.

    Raises `ConfigError` for what is no such class, and where they can't be used.
    """
    named: Sequence[Any] = config.logits_processors or ()
    points = wanted(GROUP)
    if not pools and not config.speculative_config:
        brought = [loaded(each, LogitsProcessor) for each in points]  # type: ignore[type-abstract]
        return [*brought, *map(_class, named)]
    why = "a pooling model chooses no tokens" if pools else "speculative_config is set"
    if named:
        raise ConfigError(f"logits_processors can't be used: {why}.", param="logits_processors")
    if points:
        names = ", ".join(point.name for point in points)
        log.warning("Logits processors of packages (%s) aren't used: %s.", names, why)
    return []


def _class(named: Any) -> type[LogitsProcessor]:
    found = named
    if isinstance(named, str):
        module, colon, path = named.partition(":")
        if not (module and colon and path):
            raise ConfigError(
                f"logits_processors must be classes or 'module:Class', got {named!r}.",
                param="logits_processors",
            )
        try:
            found = import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except Exception as error:  # of a module's own code, whatever it raises
            raise ConfigError(
                f"The logits processor {named} can't be loaded: {type(error).__name__}: {error}",
                param="logits_processors",
            ) from error
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        raise ConfigError(
            f"{named!r} is no subclass of engine.LogitsProcessor.", param="logits_processors"
        )
    return found
