"""Expiry times of the TLS certificates that clients see.

Gateways that terminate TLS publish theirs in Redis; a proxy's is fetched by connecting to it.
"""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import cast

import msgspec
import redis
from cryptography import x509
from django.conf import settings

from common.loops import LoopThread
from metering.redis_scripts import redis_key, sync_client

logger = logging.getLogger(__name__)

PUBLISH_INTERVAL_S = 60.0
#: A certificate not published for this long belongs to a gateway that has stopped.
MAX_SILENCE_S = 600.0
CONNECT_TIMEOUT_S = 2.0
HTTPS_PORT = 443


@dataclass(frozen=True)
class Certificate:
    """A certificate in use. `name`: where it's served, such as a host; `lifetime`: validity."""

    name: str
    expires_at: datetime
    lifetime: timedelta


class PublishedCertificate(msgspec.Struct):
    """A gateway's certificate in Redis, without its PEM file, which may contain the private key.

    `published_at`: time of publication, in seconds since the epoch.
    """

    certificate: Certificate
    published_at: float


class CertificatePublisher(LoopThread):
    """Publishes a gateway's certificate periodically while the gateway runs.

    The file is read once: a renewed certificate is only served after a restart.
    """

    def __init__(self, path: Path) -> None:
        super().__init__("quire-certificate")
        name = f"{socket.gethostname()} ({path.name})"
        self._certificate = _parse(name, path.read_bytes())

    def loop(self) -> None:
        with sync_client() as client:
            while not self.stopping.is_set():
                try:
                    published = PublishedCertificate(self._certificate, time.time())
                    encoded = msgspec.json.encode(published)
                    client.hset(_key(), self._certificate.name, encoded)
                except (redis.RedisError, OSError) as error:
                    logger.debug("the certificate can't be published: %s", error)
                self.stopping.wait(PUBLISH_INTERVAL_S)


def served_certificates() -> Iterator[Certificate]:
    """Yield the certificates of the gateways, then those of the proxy for each public host name."""
    with sync_client() as client:
        fields = cast("dict[bytes, bytes]", client.hgetall(_key()))
        for name, value in fields.items():
            published = msgspec.json.decode(value, type=PublishedCertificate)
            if published.published_at < time.time() - MAX_SILENCE_S:
                client.hdel(_key(), name.decode())
            else:
                yield published.certificate
    if settings.QUIRE.tls == "proxy":
        for host in filter(_is_public_name, settings.QUIRE.allowed_hosts):
            try:
                yield _parse(host, _ask_for_certificate(host))
            except (OSError, ValueError) as error:
                logger.debug("the certificate of %s can't be read: %s", host, error)


def _key() -> str:
    return redis_key("certificates")


def _parse(name: str, pem: bytes) -> Certificate:
    """Parse the first certificate of a chain. Raises ValueError."""
    certificate = x509.load_pem_x509_certificates(pem)[0]
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return Certificate(name, end, end - start)


def _ask_for_certificate(host: str) -> bytes:
    """Fetch a server's certificate without verifying it: it may be expired. Raises OSError."""
    address = (host, HTTPS_PORT)
    return ssl.get_server_certificate(address, timeout=CONNECT_TIMEOUT_S).encode()


def _is_public_name(host: str) -> bool:
    """Return whether it is a host name: not a pattern, and not an address of this machine."""
    if host.startswith((".", "*")) or host == "localhost":
        return False
    try:
        return not ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return True
