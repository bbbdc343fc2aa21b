"""Request ids: the client's name for a request, cleaned, and our own."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

#: The digits of the request's own id, until something takes them. A list, so that tasks of one
#: request, whose contexts are copies, don't take them twice.
_digits: ContextVar[list[str] | None] = ContextVar("request_digits", default=None)
_SAFE = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


def new_id(prefix: str = "req") -> str:
    """`prefix-` and 128 random bits in hexadecimal.

    The first one made for a request whose own id is ours has the same bits: who reads
    `req-abc...` in a header finds `chatcmpl-abc...` in the ledger.
    """
    left = _digits.get()
    return f"{prefix}-{left.pop() if left else secrets.token_hex(16)}"


def harmless(header: str) -> str:
    """A client's name for its request, "" where that isn't one harmless word."""
    return header if _SAFE.fullmatch(header) and "//" not in header else ""


def clean_request_id(header: str | None) -> str:
    """The client's `X-Request-Id` if it is one harmless word, else a new one.

    It labels log lines and the response. A client's is never the key of anything: usage is keyed
    by an id that only the server knows to make.
    """
    if header and harmless(header):
        _digits.set(None)
        return header
    digits = secrets.token_hex(16)
    _digits.set([digits])
    return f"req-{digits}"
