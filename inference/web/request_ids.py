"""Request ids: the client's name for a request, cleaned, and our own."""

from __future__ import annotations

import re
import secrets

_SAFE = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


def new_id(prefix: str = "req") -> str:
    """`prefix-` and 128 random bits in hexadecimal."""
    return f"{prefix}-{secrets.token_hex(16)}"


def clean_request_id(header: str | None) -> str:
    """The client's `X-Request-Id` if it is one harmless word, else a new one.

    It labels log lines and the response. It's never the key of anything: usage is keyed by an id
    that only the server knows to make.
    """
    if header and _SAFE.fullmatch(header) and "//" not in header:
        return header
    return new_id()
