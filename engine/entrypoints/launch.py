"""Starts `quire` in place of the running program: the server is above the engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from engine.contract.errors import ConfigError


def exec_quire(words: Sequence[str]) -> None:
    """Replace this process by `quire WORDS`.

    Raises `ConfigError` if model classes are registered here, which replicas would not see.
    """
    registry = sys.modules.get("engine.models.registry")
    if registry is not None and (names := registry.ModelRegistry.get_registered_archs()):
        raise ConfigError(
            f"{', '.join(names)} can't be registered by the program that starts the server: "
            "replicas are processes of their own. Name the class in a package's entry point "
            "quire.models (docs/extending.md).",
            param="model",
        )
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", "quire", *words]
    os.execv(command[0], command)  # noqa: S606 - our own Python
