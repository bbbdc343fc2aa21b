"""Every setting of this process as it is: its value, where that came from, what it means.

What is secret is never shown, here or anywhere: only whether it is set.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from common.redaction import without_credentials
from common.settings import ADDRESSES, FROM_FLAGS, GROUPS, READ, SECRETS, words
from inference.settings import GatewaySettings, gateway_settings

MAX_VALUE_CHARS = 500


@dataclass(frozen=True)
class InForce:
    """One setting.

    Attributes:
        source: "environment", "flag", "data dir", "settings module" or "default".
        value, default: in words; of a secret whether it's set.
    """

    name: str
    group: str
    help: str
    value: str
    default: str
    source: str
    secret: bool = False


def in_force() -> list[InForce]:
    """All of them, in the order of their groups."""
    return [*_variables(), *_gateway()]


def _variables() -> Iterator[InForce]:
    flags = set(words(FROM_FLAGS, []))
    for group, found in GROUPS.items():
        for name, text in found.items():
            given = bool(os.environ.get(name, "").strip())
            reading = READ.get(name)
            value = reading.value if reading is not None else os.environ.get(name, "")
            default = reading.default if reading is not None else ""
            source = "default"
            if given:
                source = "flag" if name in flags else "environment"
            elif name == "QUIRE_SECRET_KEY":
                source = "data dir"
            secret = name in SECRETS
            if secret:
                shown = "set" if given or source == "data dir" else "not set"
                yield InForce(name, group, text, shown, "not set", source, secret=True)
                continue
            yield InForce(name, group, text, _words(name, value), _words(name, default), source)


def _gateway() -> Iterator[InForce]:
    """Fields of `settings.QUIRE` that no variable sets."""
    told = getattr(settings, "QUIRE", {})
    by_variable = {
        name.removeprefix("QUIRE_").lower() for found in GROUPS.values() for name in found
    }
    now, helps = gateway_settings(), attributes(GatewaySettings.__doc__ or "")
    for spec in dataclasses.fields(GatewaySettings):
        if spec.name in by_variable or not spec.repr:
            continue
        source = "settings module" if spec.name.upper() in told else "default"
        value, default = getattr(now, spec.name), spec.default
        name = f"QUIRE[{spec.name.upper()!r}]"
        text = helps.get(spec.name, "")
        yield InForce(name, "Gateway", text, _words(name, value), _words(name, default), source)


def attributes(docstring: str) -> dict[str, str]:
    """The lines below "Attributes:" of a docstring, by name."""
    _, _, below = docstring.partition("Attributes:")
    found: dict[str, str] = {}
    name = ""
    for line in below.splitlines():
        if begun := re.match(r"        (\w+): (.*)", line):
            name, found[begun[1]] = begun[1], begun[2]
        elif name and line.startswith("            "):
            found[name] += " " + line.strip()
    return found


def _words(name: str, value: object) -> str:
    """A value for people. Addresses lose what lets one in."""
    if value is None or value == "" or value == [] or value == ():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and not isinstance(value, bool) and "BYTES" in name:
        return f"{value:,} ({size(value)})" if value >= 1024 else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(str(each) for each in value)[:MAX_VALUE_CHARS]
    if isinstance(value, Path):
        return str(value)
    text = str(value)
    return (without_credentials(text) if name in ADDRESSES else text)[:MAX_VALUE_CHARS]


def size(nbytes: int) -> str:
    """Bytes in the largest unit that leaves a whole number, such as "10 MiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"
