"""Requests to the identity provider: by the rules of `tenants.egress`.

The provider's own document says where its other pages are, so these may lie anywhere too: names are
resolved once and must be public (or in `QUIRE_EGRESS_NETWORKS`), and redirects aren't followed.
"""

from __future__ import annotations

import functools
import logging
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import requests
from allauth.socialaccount import app_settings
from django.conf import settings
from requests.adapters import HTTPAdapter

from engine.contract.errors import QuireError
from tenants.egress import Address, Target, check_url, resolve

logger = logging.getLogger(__name__)

#: Where a provider may run beside this process, when the operator has named it so.
LOOPBACK = ("localhost", "127.0.0.1")


class ProviderSession(requests.Session):
    """Raises `requests.RequestException` for what may not be asked, too."""

    def __init__(self) -> None:
        super().__init__()
        self.trust_env = False
        self.max_redirects = 0
        timed = functools.partial(super().request, timeout=app_settings.REQUESTS_TIMEOUT)
        self.request = timed  # type: ignore[method-assign]

    def get_adapter(self, url: str | bytes) -> HTTPAdapter:
        """One that goes to the address that was looked at."""
        try:
            target = check_url(str(url))
            local = target.host in LOOPBACK and target.host in _issuers()
            return _Pinned(target, target.host if local else resolve(target.host, target.port))
        except QuireError as error:
            logger.error("The identity provider can't be asked: %s", error.message)
            raise requests.ConnectionError(error.message) from error


def _issuers() -> set[str]:
    """Hosts of the providers that the operator has named."""
    apps: list[dict[str, Any]] = settings.SOCIALACCOUNT_PROVIDERS["openid_connect"]["APPS"]
    return {urlsplit(app["settings"]["server_url"]).hostname or "" for app in apps}


class _Pinned(HTTPAdapter):
    """To an address; the name is for the certificate and the `Host` header."""

    def __init__(self, target: Target, address: Address | str) -> None:
        self._target, self._address = target, str(address)
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """The certificate is the name's."""
        if self._target.scheme == "https":
            kwargs |= {"server_hostname": self._target.host, "assert_hostname": self._target.host}
        super().init_poolmanager(*args, **kwargs)

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> Any:
        """With the address in the name's place."""
        parts = urlsplit(str(request.url))
        request.headers["Host"] = parts.netloc
        host = f"[{self._address}]" if ":" in self._address else self._address
        request.url = urlunsplit(parts._replace(netloc=f"{host}:{self._target.port}"))
        return super().send(request, *args, **kwargs)
