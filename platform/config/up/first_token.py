"""Proof that a client is served: a token, asked for through HTTP as a client asks."""

from __future__ import annotations

import logging
import threading

import httpx

logger = logging.getLogger(__name__)

TRY_EVERY_S = 0.2


class FirstToken(threading.Thread):
    """Asks until it gets one.

    Attributes:
        proven: set once a completion with a token has come back.
        last_error: what the latest answer said instead.
    """

    def __init__(self, url: str, api_key: str, model: str) -> None:
        super().__init__(name="first-token", daemon=True)
        self.url, self.api_key, self.model = url, api_key, model
        self.proven = threading.Event()
        self.last_error = ""
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Stop asking."""
        self._stopping.set()

    def run(self) -> None:
        # The certificate may be for another name than 127.0.0.1: this asks the process beside us.
        client = httpx.Client(base_url=self.url, timeout=60, verify=False, trust_env=False)  # noqa: S501
        with client:
            while not self._stopping.is_set():
                if self._ask(client):
                    self.proven.set()
                    return
                self._stopping.wait(TRY_EVERY_S)

    def _ask(self, client: httpx.Client) -> bool:
        """Whether a request of one token was answered."""
        try:
            response = client.post(
                "/v1/completions",
                headers={"Authorization": f"Bearer {self.api_key}"},
                json={"model": self.model, "prompt": "Hello", "max_tokens": 1, "stream": False},
            )
            if response.status_code == httpx.codes.OK:
                return bool(response.json()["usage"]["completion_tokens"])
            self.last_error = f"{response.status_code}: {response.text[:300]}"
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self.last_error = str(error) or type(error).__name__
        logger.debug("no first token yet: %s", self.last_error)
        return False
