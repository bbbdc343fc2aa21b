"""A secret on its way from the POST that made it to the page that shows it, once.

A POST answers with a redirect, so that reloading the page makes nothing twice. The secret waits in
the session meanwhile: encrypted, for a minute, and gone with the first look at it.
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
    """Keep values that JSON can hold for the next page that this session looks at."""
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
    """Encrypts with a key made from Django's secret one; reads what its predecessors encrypted."""
    label = f"quire {purpose}".encode()
    keys = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    digests = (hmac.digest(key.encode(), label, "sha256") for key in keys)
    return MultiFernet([Fernet(base64.urlsafe_b64encode(digest)) for digest in digests])
