"""Whether engine settings can be used here: by the engine's own rules, and by what apps add."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.contract.config import EngineConfig

#: Raises `ConfigError` (with `param`) for settings that can't be used.
SettingsCheck = Callable[[Mapping[str, Any]], None]
_checks: list[SettingsCheck] = []


def register(check: SettingsCheck) -> None:
    """Have settings checked by `check` as well, before a model is loaded with them."""
    if check not in _checks:
        _checks.append(check)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` (with `param`) unless a model may be loaded with these settings."""
    EngineConfig.from_mapping(dict(settings))
    for check in _checks:
        check(settings)
