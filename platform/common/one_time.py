"""Passing a secret from the POST that created it to the page that shows it once.

A POST responds with a redirect, so that reloading the page creates nothing twice. Meanwhile the
secret waits in the session: encrypted, for at most a minute, and deleted when it is read.
"""

from __future__ import annotations

import base64
import hmac
import json
from typing import Any

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings
from django.http import HttpRequest

NAME = "quire_shown_once"
SECONDS = 60


def store_one_time(request: HttpRequest, **values: Any) -> None:
    """Store JSON-serializable values for the next page of this session."""
    text = json.dumps(values).encode()
    request.session[NAME] = _fernet().encrypt(text).decode()


def pop_one_time(request: HttpRequest) -> dict[str, Any]:
    """Return the stored values once; empty if there are none, or they are over a minute old."""
    stored = request.session.pop(NAME, None)
    if stored is None:
        return {}
    try:
        return dict(json.loads(_fernet().decrypt(stored.encode(), ttl=SECONDS)))
    except InvalidToken:
        return {}


def _fernet() -> MultiFernet:
    return fernet_for("shown once")


def fernet_for(purpose: str) -> MultiFernet:
    """Encrypts with a key derived from Django's secret key; decrypts with its fallbacks, too."""
    label = f"quire {purpose}".encode()
    keys = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    digests = (hmac.digest(key.encode(), label, "sha256") for key in keys)
    return MultiFernet([Fernet(base64.urlsafe_b64encode(digest)) for digest in digests])
