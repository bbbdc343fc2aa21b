"""Answers requests with `Upgrade: h2c` in HTTP/1.1, as a server may (RFC 9110, 7.8).

Java's HttpClient sends one by default. httptools takes all that follows such a request's head, its
body too, for the other protocol, and the request would seem to have no body.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_FRAMING = (b"content-length", b"transfer-encoding")


class _Callbacks:
    """A protocol's callbacks; those of a head do nothing while `in_head` is set."""

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self.in_head = True
        self.on_message_begin = self._of_head(protocol.on_message_begin)
        self.on_url = self._of_head(protocol.on_url)
        self.on_header = self._of_head(protocol.on_header)
        self.on_headers_complete = self._of_head(protocol.on_headers_complete)
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def _of_head(self, callback: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            if not self.in_head:
                callback(*arguments)

        return call


class _Parser:
    """httptools' parser, replaced by another one after a head with an upgrade that is ignored."""

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol, self._parser = protocol, protocol.parser

    def feed_data(self, data: bytes) -> None:
        """Parse received bytes. Raises what httptools raises."""
        while data:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._protocol._should_upgrade():
                    raise
                self._expect_body()
                data = data[upgrade.args[0] :]
            else:
                return

    def _expect_body(self) -> None:
        """Go on with a parser that expects the body of the protocol's current request."""
        callbacks = _Callbacks(self._protocol)
        self._parser = httptools.HttpRequestParser(callbacks)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        headers = self._protocol.headers
        framing = [b"%s: %s\r\n" % header for header in headers if header[0] in _FRAMING]
        self._parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *framing, b"\r\n"]))
        callbacks.in_head = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


class IgnoredUpgradesProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which reads such requests whole."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser = _Parser(self)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        """Called at a message's end, by httptools already after a head with an upgrade."""
        if not self.parser.should_upgrade() or self._should_upgrade():
            super().on_message_complete()
