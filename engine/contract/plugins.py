"""Entry points of installed packages that plug into Quire. Torch-free; imports none of them.

QUIRE_PLUGINS, where it is set, names those that are wanted, with commas between; "" means none.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from engine.contract.errors import ConfigError

Kind = TypeVar("Kind")
DEVICES = "quire.devices"
_BUILT_IN_DEVICES = ("auto", "cpu", "cuda")


def is_wanted(name: str) -> bool:
    """Whether QUIRE_PLUGINS, where it is set, has this name."""
    names = os.environ.get("QUIRE_PLUGINS")
    return names is None or name in {each.strip() for each in names.split(",")}


def wanted(group: str) -> list[EntryPoint]:
    """The group's entry points, but for those that QUIRE_PLUGINS leaves out."""
    return [point for point in _installed(group, tuple(sys.path)) if is_wanted(point.name)]


@cache
def _installed(group: str, folders: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Of the packages in these folders: to look through all of them takes longer than all else
    that a small model's start does.
    """
    return tuple(entry_points(group=group))


def loaded(point: EntryPoint, base: type[Kind]) -> type[Kind]:
    """The subclass of `base` that an entry point names.

    As in vLLM it may also name a function that returns the class, or its "package.module.Class".

    Raises `ConfigError` for one that can't be imported or is something else.
    """
    return checked_class(point, named_by(point), base)


def named_by(point: EntryPoint) -> object:
    """What an entry point names; of a function, what it returns; of a dotted path, what's there.

    Raises `ConfigError` for one that can't be imported or fails.
    """
    try:
        found = point.load()
        if not isinstance(found, type) and callable(found):
            found = found()
        if isinstance(found, str):
            module, _, name = found.rpartition(".")
            found = getattr(import_module(module), name)
        return found
    except Exception as error:
        raise ConfigError(
            f"The plugin {point.name} ({point.value}) can't be loaded: {error}",
            param="QUIRE_PLUGINS",
        ) from error


def checked_class(point: EntryPoint, found: object, base: type[Kind]) -> type[Kind]:
    """The same, known to be a subclass of `base`. Raises `ConfigError`."""
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"The plugin {point.name} ({point.value}) is no subclass of "
            f"{base.__module__}.{base.__qualname__}.",
            param="QUIRE_PLUGINS",
        )
    return found


def check_device(name: str) -> None:
    """Raise `ConfigError` for the name of no device, built-in or installed."""
    if name in _BUILT_IN_DEVICES:
        return
    installed = sorted(point.name for point in wanted(DEVICES))
    if name not in installed:
        known = ", ".join([*_BUILT_IN_DEVICES, *installed])
        raise ConfigError(f"device must be one of {known}; got {name!r}.", param="device")
