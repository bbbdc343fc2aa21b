"""What this installation may ask on somebody's word."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from common import outbound_http as egress
from common.outbound_http import (
    OutboundRequestBlocked,
    check_public,
    check_url,
    fetch,
    post_webhook,
    resolve,
)
from engine.contract.errors import InvalidRequest


class Receiver(BaseHTTPRequestHandler):
    """Keeps what it gets; redirects what asks for `/away`, and is slow to answer `/slow`."""

    got: list[tuple[str, bytes, str]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/slow":
            for letter in b"HTTP/1.1 200 OK\r\nX-Drop: by drop\r\n\r\n":
                time.sleep(0.05)
                self.wfile.write(bytes([letter]))
            return
        self.server.got.append((self.path, body, self.headers["Host"]))  # type: ignore[attr-defined]
        self.send_response(302 if self.path == "/away" else 204)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("Location", "http://[x/")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    http_server = HTTPServer(("127.0.0.1", 0), Receiver)
    http_server.got = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=http_server.serve_forever, daemon=True)
    thread.start()
    yield http_server
    http_server.shutdown()
    http_server.server_close()


@pytest.fixture
def allowed(settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(egress_networks=("127.0.0.0/8",))


def pretend(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let every name have these addresses."""

    def resolve_host(host: str, port: int, **_: Any) -> list[Any]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses
        ]

    monkeypatch.setattr(egress.socket, "getaddrinfo", resolve_host)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "fe80::1", "fc00::1", "::"),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "2002:7f00:1::", "64:ff9b::7f00:1"),
        *("ff02::1", "192.0.2.1", "2001:db8::1", "fe80::1%eth0", "::7f00:1", "::a00:1"),
    ],
)
def test_fault_62_a_name_that_leads_to_a_private_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    pretend(monkeypatch, address)
    with pytest.raises(OutboundRequestBlocked, match="private network"):
        resolve("hook.example.org", 443)
    pretend(monkeypatch, "93.184.215.14", address)  # one bad address among good ones
    with pytest.raises(OutboundRequestBlocked, match="private network"):
        post_webhook("https://hook.example.org/", b"", {})


@pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "0x7f.1", "localhost", "[::1]"])
def test_fault_62_however_this_machine_is_written(host: str, server: HTTPServer) -> None:
    with pytest.raises(OutboundRequestBlocked):
        post_webhook(f"http://{host}:{server.server_port}/", b"x", {})
    assert server.got == []  # type: ignore[attr-defined]


def test_fault_62_a_redirect_is_not_followed(server: HTTPServer, allowed: None) -> None:
    assert post_webhook(f"http://127.0.0.1:{server.server_port}/away", b"x", {}) == 302
    assert [path for path, *_ in server.got] == ["/away"]  # type: ignore[attr-defined]


def test_fault_62_an_answer_drop_by_drop_holds_nobody_up(
    server: HTTPServer, allowed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, but not all of them."""
    monkeypatch.setattr(egress, "TIMEOUT_S", 0.5)
    with pytest.raises(OutboundRequestBlocked, match="doesn't answer"):
        post_webhook(f"http://127.0.0.1:{server.server_port}/slow", b"x", {})


def test_fault_62_a_name_that_is_bound_anew_after_the_check_changes_nothing(
    server: HTTPServer, allowed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])

    def resolve_host(host: str, port: int, **_: Any) -> list[Any]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in next(answers)
        ]

    real = socket.getaddrinfo
    monkeypatch.setattr(
        egress.socket,
        "getaddrinfo",
        lambda host, *a, **k: (
            resolve_host(host, *a) if host == "hook.test" else real(host, *a, **k)
        ),
    )
    url = f"http://hook.test:{server.server_port}/in?a=1"
    assert post_webhook(url, b"hello", {"X-A": "b"}) == 204
    ((path, body, host),) = server.got  # type: ignore[attr-defined]
    assert (path, body) == ("/in?a=1", b"hello")
    assert host == f"hook.test:{server.server_port}"
    with pytest.raises(OutboundRequestBlocked, match=r"10\.0\.0\.1"):
        post_webhook(url, b"again", {})


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://example.org/", "file:///etc/passwd", "gopher://x", "example.org", "https://", ""),
        *("https://user:pw@example.org/", "https://example.org/#x", "https://exa mple.org/"),
        *(
            "https://example.org:99999/",
            "https://example.org:0/",
            "https://ex\r\nHost: a/",
            "https://[::1/",
        ),
        "https://example.org/" + "x" * 2000,
    ],
)
def test_what_is_no_address_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_url(url, param="webhook_url")
    assert caught.value.param == "webhook_url"


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.1", "2130706433", "0x7f.1", "0", "localhost", "a.localhost."),
        *("10.0.0.1", "169.254.169.254", "100.64.0.1", "[::1]", "[fe80::1%25lo]"),
        *("[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]"),
    ],
)
def test_fault_62_a_private_address_in_numbers_is_not_kept(host: str, settings: Any) -> None:
    with pytest.raises(InvalidRequest, match="private network") as caught:
        check_public(f"https://{host}/in")
    assert caught.value.param == "url"
    settings.QUIRE = settings.QUIRE.replace(egress_networks=("0.0.0.0/0", "::/0"))
    check_public(f"https://{host}/in")


def test_a_name_or_a_public_address_is_kept_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("it was looked up"))
    for host in ("hook.example", "8.8.8.8", "[2606:4700::1111]"):
        check_public(f"https://{host}/in")


def test_a_server_that_is_not_there_is_a_clear_error(allowed: None) -> None:
    with pytest.raises(OutboundRequestBlocked, match="doesn't answer"):
        post_webhook("http://127.0.0.1:9/", b"", {})


def test_a_redirect_to_what_is_no_address_is_refused(server: HTTPServer, allowed: None) -> None:
    with pytest.raises(OutboundRequestBlocked, match="Invalid IPv6 URL"):
        fetch(f"http://127.0.0.1:{server.server_port}/", max_bytes=9, timeout_s=5, param="url")
