"""The proxies' examples in the real programs: tokens pass as they come, sockets and files too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

from tests.deploy import proxies


@dataclass(slots=True)
class Site:
    """A proxy with what stands behind it."""

    address: str
    upstream: proxies.Upstream
    client: httpx.Client


@pytest.fixture(scope="module", params=[proxies.nginx, proxies.caddy], ids=["nginx", "caddy"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    command: Callable[[Path, int, int], list[str]] = request.param
    folder, port = tmp_path_factory.mktemp("proxy"), proxies.free_port()
    folder.chmod(0o755)  # nginx's workers are somebody else
    with (
        proxies.upstream() as following_proxy,
        proxies.running(command(folder, port, following_proxy.port), folder, port) as address,
        httpx.Client(
            base_url=f"https://{address}", verify=proxies.trusting_nobody_signed(), timeout=20
        ) as client,
    ):
        yield Site(address, following_proxy, client)


@pytest.fixture
def site(running: Site) -> Site:
    running.upstream.go_on.clear()
    running.upstream.began.clear()
    return running


def test_a_token_is_there_before_the_next_is_sent(site: Site) -> None:
    with site.client.stream("GET", "/stream") as answer:
        parts = answer.iter_raw()
        assert next(parts) == b"data: 1\n\n"
        site.upstream.go_on.set()
        assert b"".join(parts) == b"data: 2\n\n"


def test_a_file_arrives_while_it_is_still_being_sent(site: Site) -> None:
    def body() -> Iterator[bytes]:
        yield bytes(1 << 20)
        assert site.upstream.began.wait(60), "the proxy holds the body back"
        yield bytes(1 << 20)

    answer = site.client.post("/upload", content=body(), headers={"Content-Length": str(2 << 20)})
    assert answer.json() == 2 << 20


def test_a_socket_passes(site: Site) -> None:
    secure = proxies.trusting_nobody_signed()
    with connect(f"wss://{site.address}/ws", ssl=secure, proxy=None) as socket:
        for text in ("one", "two"):
            socket.send(text)
            assert socket.recv(timeout=60) == text


def test_a_client_does_not_choose_its_own_address(site: Site) -> None:
    claimed = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "http"}
    sent = httpx.Headers(site.client.get("/headers", headers=claimed).json())
    assert sent["x-forwarded-for"] == "127.0.0.1"
    assert sent["x-forwarded-proto"] == "https"
    assert sent["host"] == site.address
