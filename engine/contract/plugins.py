"""Entry points of installed packages that plug into Quire. Torch-free; imports none of them.

QUIRE_PLUGINS, where it is set, names those that are wanted, with commas between; "" means none.
"""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint, entry_points

from engine.contract.errors import ConfigError

DEVICES = "quire.devices"
_BUILT_IN_DEVICES = ("auto", "cpu", "cuda")


def wanted(group: str) -> list[EntryPoint]:
    """The group's entry points, but for those that QUIRE_PLUGINS leaves out."""
    names = os.environ.get("QUIRE_PLUGINS")
    chosen = None if names is None else {name.strip() for name in names.split(",")}
    return [point for point in entry_points(group=group) if chosen is None or point.name in chosen]


def check_device(name: str) -> None:
    """Raise `ConfigError` for the name of no device, built-in or installed."""
    if name in _BUILT_IN_DEVICES:
        return
    installed = sorted(point.name for point in wanted(DEVICES))
    if name not in installed:
        known = ", ".join([*_BUILT_IN_DEVICES, *installed])
        raise ConfigError(f"device must be one of {known}; got {name!r}.", param="device")
