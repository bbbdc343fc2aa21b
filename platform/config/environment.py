"""Reading settings from environment variables, with errors that name the variable.

What is read is remembered, with its default: `config.in_force` shows it to operators.
"""

import ipaddress
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")

#: Names of variables that flags of a command line have set, for the processes that it starts.
FROM_FLAGS = "QUIRE_FROM_FLAGS"
T = TypeVar("T")
#: Segments without "." and "..", and none that is empty: "//host" would lead to another one.
ROOT_PATH = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)*")


@dataclass(frozen=True)
class Reading:
    """A variable as it was read."""

    value: object = field(repr=False)
    default: object


READ: dict[str, Reading] = {}


def _noted(name: str, value: T, default: object) -> T:
    READ[name] = Reading(value, default)
    return value


def note_flags(names: list[str]) -> None:
    """Say of variables that flags have set them."""
    known = words(FROM_FLAGS, [])
    os.environ[FROM_FLAGS] = ",".join(dict.fromkeys([*known, *names]))


def secret(name: str) -> str:
    """Something that nobody may read but this process; "" when it's unset."""
    value = os.environ.get(name, "")
    _noted(name, bool(value), False)
    return value


def flag(name: str, default: bool = False) -> bool:
    """A switch. Raises ImproperlyConfigured unless it's 1/0, true/false, yes/no or on/off."""
    text = os.environ.get(name)
    if text is None:
        return _noted(name, default, default)
    word = text.strip().lower()
    if word not in TRUE + FALSE:
        raise ImproperlyConfigured(f"{name} must be true or false, got {text!r}.")
    return _noted(name, word in TRUE, default)


def integer(name: str, default: int, *, low: int = 0, high: int = 2**63 - 1) -> int:
    """A whole number in [low, high]. Raises ImproperlyConfigured otherwise."""
    text = os.environ.get(name)
    if text is None or not text.strip():
        return _noted(name, default, default)
    try:
        value = int(text)
    except ValueError:
        raise ImproperlyConfigured(f"{name} must be a whole number, got {text!r}.") from None
    if not low <= value <= high:
        raise ImproperlyConfigured(f"{name} must be in [{low}, {high}], got {value}.")
    return _noted(name, value, default)


def currency(name: str, default: str) -> str:
    """Three letters, made small. Raises ImproperlyConfigured otherwise."""
    value = (os.environ.get(name) or default).strip().lower()
    if not (len(value) == 3 and value.isascii() and value.isalpha()):
        raise ImproperlyConfigured(f"{name} must be three letters such as usd, got {value!r}.")
    return _noted(name, value, default)


def choice(name: str, default: str, allowed: tuple[str, ...]) -> str:
    """One of some words. Raises ImproperlyConfigured otherwise."""
    value = os.environ.get(name, default).strip().lower()
    if value not in allowed:
        raise ImproperlyConfigured(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")
    return _noted(name, value, default)


def text(name: str, default: str) -> str:
    """Some text; set but empty counts as unset."""
    return _noted(name, os.environ.get(name, "").strip() or default, default)


def root_path(name: str) -> str:
    """A path such as "/quire", or "". Raises ImproperlyConfigured for anything else."""
    path = os.environ.get(name, "").strip()
    if not ROOT_PATH.fullmatch(path):
        raise ImproperlyConfigured(f"{name} must be a path such as /quire, got {path!r}.")
    return _noted(name, path, "")


def words(name: str, default: list[str]) -> list[str]:
    """A comma-separated list without empty entries."""
    text = os.environ.get(name)
    if text is None:
        return _noted(name, default, default)
    return _noted(name, [word.strip() for word in text.split(",") if word.strip()], default)


def mapping(name: str) -> dict[str, Any]:
    """A JSON object; unset: an empty one. Raises ImproperlyConfigured for anything else."""
    try:
        found = json.loads(os.environ.get(name, "").strip() or "{}")
    except ValueError as error:
        raise ImproperlyConfigured(f"{name} must be a JSON object: {error}.") from None
    if not isinstance(found, dict):
        raise ImproperlyConfigured(f"{name} must be a JSON object.")
    return _noted(name, found, {})


def networks(name: str) -> tuple[str, ...]:
    """Comma-separated IP addresses or networks. Raises ImproperlyConfigured for anything else."""
    found = []
    for word in words(name, []):
        try:
            found.append(str(ipaddress.ip_network(word)))
        except ValueError as error:
            raise ImproperlyConfigured(f"{name}: {error}.") from None
    return _noted(name, tuple(found), ())


def folder(name: str, default: Path) -> Path:
    """An absolute path; nothing is created."""
    return _noted(name, Path(os.environ.get(name) or default).expanduser().resolve(), default)


def folders(name: str, default: list[Path]) -> list[Path]:
    """A comma-separated list of folders, as absolute paths; nothing is created."""
    given = words(name, [])
    found = [Path(word).expanduser().resolve() for word in given] if given else default
    return _noted(name, found, default)
