"""Restrictions of a key besides its scopes: models, endpoints, addresses."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from django.core.exceptions import ValidationError

#: Maximum length of a list.
MAX_ENTRIES = 200
MAX_CHARS = 200
_PATH = re.compile(r"/[A-Za-z0-9_./-]*")


def validate_models(value: Any) -> None:
    """Names of models. Raises ValidationError."""
    for name in _validate_strings(value):
        if not name.strip() or "\0" in name:
            raise ValidationError("Must be names of models.")


def validate_endpoints(value: Any) -> None:
    """Paths such as `/v1/chat/completions`, including all below. Raises ValidationError."""
    for path in _validate_strings(value):
        if not _PATH.fullmatch(path):
            raise ValidationError(f"{path[:50]!r} isn't a path: use one like /v1/chat/completions.")


def validate_addresses(value: Any) -> None:
    """Addresses or networks such as `10.0.0.0/8`. Raises ValidationError."""
    for text in _validate_strings(value):
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            raise ValidationError(f"{text[:50]!r} isn't an address range: {error}.") from error


def validate_time_zone(value: str) -> None:
    """A name of the time zone database. Raises ValidationError."""
    from zoneinfo import ZoneInfo

    try:
        ZoneInfo(value)
    except (KeyError, ValueError, OSError) as error:
        raise ValidationError(
            f"{value[:50]!r} isn't a time zone: use one like Europe/Berlin."
        ) from error


def _validate_strings(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValidationError("Must be a list of texts.")
    if len(value) > MAX_ENTRIES or any(len(item) > MAX_CHARS for item in value):
        raise ValidationError(f"Takes at most {MAX_ENTRIES} texts of {MAX_CHARS} characters.")
    return value
