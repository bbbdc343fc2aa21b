"""Removing secrets from text that others read: logs, spans, output of commands, errors."""

import re
from urllib.parse import urlsplit

#: API keys (`tenants.api_keys`), and links that grant access to anyone who has them.
_TOKENS = re.compile(
    r"(/invitation/|/account/password/reset/key/|sk-quire-[a-z0-9]{10})[a-z0-9_-]{12,}", re.I
)


def without_tokens(text: str) -> str:
    """Replace keys and links that grant access by ***."""
    return _TOKENS.sub(r"\1***", text)


def without_credentials(address: str) -> str:
    """The URL without user, password and parameters."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return "set, but it can't be read"
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"
