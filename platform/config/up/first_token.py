"""Proof that a client is served: a token, asked for through HTTP as a client asks."""

from __future__ import annotations

import http.client
import json
import logging
import ssl
import threading
import urllib.request
from urllib.error import HTTPError

logger = logging.getLogger(__name__)

TRY_EVERY_S = 0.2
TIMEOUT_S = 60.0


class FirstToken(threading.Thread):
    """Asks until it gets one.

    Attributes:
        tls: how it speaks TLS.
        proven: set once a completion with a token has come back.
        last_error: what the latest answer said instead.
    """

    def __init__(self, url: str, api_key: str, model: str) -> None:
        super().__init__(name="first-token", daemon=True)
        self.url, self.api_key, self.model = url, api_key, model
        # Whatever name the certificate of the process beside us is for.
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.tls.check_hostname = False
        self.tls.verify_mode = ssl.CERT_NONE
        self.proven = threading.Event()
        self.last_error = ""
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Stop asking."""
        self._stopping.set()

    def run(self) -> None:
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),  # by no proxy
            urllib.request.HTTPSHandler(context=self.tls),
        )
        while not self._stopping.is_set():
            if self._ask(opener):
                self.proven.set()
                return
            self._stopping.wait(TRY_EVERY_S)

    def _ask(self, opener: urllib.request.OpenerDirector) -> bool:
        """Whether a request of one token was answered."""
        body = {"model": self.model, "prompt": "Hello", "max_tokens": 1, "stream": False}
        request = urllib.request.Request(  # noqa: S310 - our own address
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"},
        )
        try:
            with opener.open(request, timeout=TIMEOUT_S) as response:
                return bool(json.load(response)["usage"]["completion_tokens"])
        except HTTPError as error:
            with error:
                self.last_error = f"{error.code}: {error.read(300).decode(errors='replace')}"
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self.last_error = str(error) or type(error).__name__
        logger.debug("no first token yet: %s", self.last_error)
        return False
