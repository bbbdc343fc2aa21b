"""Secrets are removed from text that others read: logs, spans, output of commands, errors."""

import re
from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured

#: Links that grant access to anybody who has them, and API keys (`tenants.api_keys`).
_TOKENS = re.compile(
    r"(/invitation/|/account/password/reset/key/|sk-quire-[a-z0-9]{10})[a-z0-9_-]{12,}", re.I
)


def without_tokens(text: str) -> str:
    """Return the text with *** in place of keys and of links that grant access."""
    return _TOKENS.sub(r"\1***", text)


def without_credentials(address: str) -> str:
    """Return the address without user, password and parameters."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return "set, but it can't be read"
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def check_address(name: str, url: str) -> None:
    """Check that an address can be parsed.

    The error doesn't repeat it: an unparsable port is often the rest of a password with a slash.
    Raises: ImproperlyConfigured.
    """
    try:
        urlsplit(url).port  # noqa: B018 - to look is to check
    except ValueError:
        raise ImproperlyConfigured(
            f"{name} is no address that can be read. In a password write /, #, ?, : and @ as "
            "%2F, %23, %3F, %3A and %40."
        ) from None
