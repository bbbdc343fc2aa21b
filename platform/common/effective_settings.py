"""Every setting of this process: its value, source and description.

Secrets are never shown, only whether they are set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings
from pydantic import SecretStr

from common.redaction import without_credentials
from common.setting_types import TenantQuotas
from common.settings import WITHOUT_VARIABLE, QuireSettings, group_of, is_secret, variable_of
from common.settings_environment import internal_fields, variables_from_flags

MAX_VALUE_CHARS = 500


@dataclass(frozen=True)
class InForce:
    """One setting.

    Attributes:
        source: "environment", "flag", "data dir", "settings module" or "default".
        value, default: formatted; for a secret, whether it is set.
    """

    name: str
    group: str
    help: str
    value: str
    default: str
    source: str
    secret: bool = False


def in_force() -> list[InForce]:
    """All settings in the order of their groups."""
    return [_in_force(name) for name in QuireSettings.model_fields]


def _in_force(name: str) -> InForce:
    field, quire = QuireSettings.model_fields[name], settings.QUIRE
    group, variable = group_of(field), variable_of(name)
    value = getattr(quire, name)
    default: Any = field.get_default(call_default_factory=True, validated_data=dict(quire))
    source = "default"
    if group == WITHOUT_VARIABLE:
        variable = f"QUIRE.{name}"
        source = "flag" if name in internal_fields() else source
    elif os.environ.get(variable, "").strip():
        source = "flag" if variable in variables_from_flags() else "environment"
    if source == "default" and value != default:
        source = "settings module"
    if is_secret(field):
        if name == "secret_key" and source == "default":
            source = "data dir"
        is_set = value not in (SecretStr(""), ()) or source == "data dir"
        value, default = "set" if is_set else "not set", "not set"
    return InForce(
        name=variable,
        group=group,
        help=field.description or "",
        value=_format(name, value),
        default=_format(name, default),
        source=source,
        secret=is_secret(field),
    )


def _format(name: str, value: object) -> str:
    """Format a value for display. URLs lose their credentials."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and "bytes" in name and value >= 1024:
        return f"{value:,} ({size(value)})"
    if isinstance(value, int):
        return f"{value:,}"
    if value is None:
        return ""
    if isinstance(value, TenantQuotas):
        value = {key: size(item) if "bytes" in key else item for key, item in value}
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={item}" for key, item in value.items())[:MAX_VALUE_CHARS]
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)[:MAX_VALUE_CHARS]
    if isinstance(value, Path):
        return str(value)
    text = str(value)
    return (without_credentials(text) if "://" in text else text)[:MAX_VALUE_CHARS]


def size(nbytes: int) -> str:
    """Format bytes in the largest unit that gives an integer, such as "10 MiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"
