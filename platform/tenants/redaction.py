"""What must be taken out of texts that others than their owner read: logs, spans, commands."""

import re
from urllib.parse import urlsplit

#: Links that let whoever has them in, and API keys by their shape (`tenants.api_keys`).
_TOKENS = re.compile(
    r"(/invitation/|/account/password/reset/key/|sk-quire-[a-z0-9]{10})[a-z0-9_-]{12,}", re.I
)


def without_tokens(text: str) -> str:
    """The text with *** for what lets somebody in."""
    return _TOKENS.sub(r"\1***", text)


def without_credentials(address: str) -> str:
    """Where an address leads to: without user, password and parameters."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return "set, but it can't be read"
    place = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{place}{parts.path}"
