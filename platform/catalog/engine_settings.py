"""Command line of a served model's replica."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.object_storage import has_object_storage
from engine.contract.engine_config import EngineConfig

#: The command by which replicas fetch adapters from an object storage.
FETCH_ADAPTER = shlex.join([sys.executable, "-m", "quire", "fetch_adapter"])
ENGINE_SERVICE = (sys.executable, "-m", "engine.serving")


def engine_flags(settings: Mapping[str, Any]) -> list[str]:
    """`EngineConfig` settings as flags. None means the default and is omitted."""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}", *map(str, value)]
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            flags.append(f"--{flag}={text}")  # one argument: a value may start with a hyphen
    return flags


def replica_command(
    settings: Mapping[str, Any],
    *,
    replica_id: str,
    key_prefix: str,
    drain_seconds: float,
    spare: bool = False,
    health_port: int | None = None,
    endpoint: str = "",
    program: Sequence[str] = (),
) -> list[str]:
    """Argument list of one replica's process; `program` replaces `python -m engine.serving`.

    Every user of the machine can read it, so Redis's URL, which may hold a password, is passed in
    the environment, as REDIS_URL.
    """
    return [
        *(program or ENGINE_SERVICE),
        f"--replica-id={replica_id}",
        f"--key-prefix={key_prefix}",
        f"--drain-timeout={drain_seconds}",
        *(["--spare"] if spare else []),
        *([] if health_port is None else [f"--health-port={health_port}"]),
        *([f"--endpoint={endpoint}"] if endpoint else []),
        *([f"--adapter-fetch-command={FETCH_ADAPTER}"] if has_object_storage() else []),
        *engine_flags(settings),
    ]


#: Raises `ConfigError` (with `param`) for invalid settings.
SettingsCheck = Callable[[Mapping[str, Any]], None]
_checks: list[SettingsCheck] = []


def register_settings_validator(check: SettingsCheck) -> None:
    """Register `check` to validate settings, too, before a model is loaded with them."""
    if check not in _checks:
        _checks.append(check)


def validate_engine_settings(settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` (with `param`) unless a model may be loaded with these settings."""
    EngineConfig.from_mapping(dict(settings))
    for check in _checks:
        check(settings)
