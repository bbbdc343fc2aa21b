"""The one Redis address in the spellings that its users want."""

import hashlib
import os
import tempfile
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

from django.core.exceptions import ImproperlyConfigured

SCHEMES = ("redis", "rediss", "unix")
#: The kernel's limit on a Unix socket's path is 108 bytes with the closing NUL (104 on macOS).
MAX_SOCKET_PATH = 100


def socket_path(data_dir: Path) -> Path:
    """The socket of this data dir's server. A long data dir gets a short stand-in folder."""
    path = data_dir / "redis" / "redis.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    name = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"quire-{os.getuid()}-{name}" / "redis.sock"


def socket_url(data_dir: Path) -> str:
    """Where `manage.py up` puts this data dir's embedded Redis."""
    return f"unix://{quote(str(socket_path(data_dir)))}"


def checked_url(url: str) -> str:
    """`REDIS_URL` as it is. Raises ImproperlyConfigured for what is no Redis's address."""
    scheme = urlsplit(url).scheme
    if "sentinel" in scheme:
        raise ImproperlyConfigured(
            "REDIS_URL names one server: Sentinels aren't asked who the primary is. Name an "
            "address that follows it, such as a proxy's."
        )
    if scheme not in SCHEMES:
        raise ImproperlyConfigured(
            f"REDIS_URL must start with redis://, rediss:// or unix://, not {scheme!r}. "
            "Unset, `manage.py up` runs a Redis of its own."
        )
    check_address("REDIS_URL", url)
    return url


def check_address(name: str, url: str) -> None:
    """Raise ImproperlyConfigured for an address that can't be taken apart, and don't show it: what
    stands in the port's place is the rest of a password with a slash, say.
    """
    try:
        urlsplit(url).port  # noqa: B018 - to look is to check
    except ValueError:
        raise ImproperlyConfigured(
            f"{name} is no address that can be read. In a password write /, #, ?, : and @ as "
            "%2F, %23, %3F, %3A and %40."
        ) from None


def celery_url(redis_url: str) -> str:
    """Celery's spelling: a Unix socket is `redis+socket://`, its database `virtual_host`."""
    parts = urlsplit(redis_url)
    if parts.scheme != "unix":
        return redis_url
    database = parse_qs(parts.query).get("db", ["0"])[0]
    return f"redis+socket://{parts.path}?virtual_host={database}"
