"""Live pages before the product's own socket and a real layer and who hears what."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from playwright.sync_api import Browser, BrowserContext, Page, expect

from engine.contract import protocol
from tests.console.beats import heartbeat
from tests.console.browser.conftest import DESKTOP, Sessions
from tests.console.live import LiveServer


@pytest.fixture(scope="module")
def product(instance: dict[str, str], tmp_path_factory: Any) -> Iterator[LiveServer]:
    """The product's ASGI application under uvicorn, with a prefix of its own."""
    env = instance | {"QUIRE_KEY_PREFIX": instance["QUIRE_KEY_PREFIX"] + "live"}
    log = tmp_path_factory.mktemp("product") / "log"
    running = LiveServer("config.asgi:application", env, log, lifespan="on")
    running.start()
    yield running
    running.stop()


@pytest.fixture
def context(browser: Browser, product: LiveServer, sessions: Sessions) -> Iterator[BrowserContext]:
    made = browser.new_context(storage_state=sessions["root"], viewport=DESKTOP)
    made.set_default_timeout(30_000)
    yield made
    made.close()


def beats(product: LiveServer, running: int) -> None:
    """A replica's heartbeat, which stays."""
    client: Any = redis.Redis.from_url(product.env["REDIS_URL"])
    prefix = product.env["QUIRE_KEY_PREFIX"]
    beat = heartbeat("quill-0", at=time.time(), stats={"num_requests_running": running})
    client.sadd(protocol.replicas_key(prefix), beat.replica_id)
    client.set(protocol.replica_key(beat.replica_id, prefix), protocol.encode(beat), px=600_000)
    client.close()


def watched(context: BrowserContext, url: str) -> tuple[Page, list[str]]:
    """A page, and the addresses of the sockets that it opens."""
    page = context.new_page()
    sockets: list[str] = []
    page.on("websocket", lambda socket: sockets.append(socket.url))
    page.goto(url)
    return page, sockets


def test_two_tabs_share_a_socket_and_the_second_takes_it_over(
    context: BrowserContext, product: LiveServer
) -> None:
    beats(product, running=33)
    url = f"{product.url}/console/"
    first, of_first = watched(context, url)
    row = first.get_by_role("row").filter(has_text="quill").first
    expect(row).to_contain_text("33")
    first.wait_for_timeout(1000)
    second, of_second = watched(context, url)
    asked: list[str] = []
    second.on("request", lambda r: asked.append(r.url) if "api/overview" in r.url else None)
    second.wait_for_timeout(3000)  # its first question is answered; from now on the socket tells
    asked.clear()
    beats(product, running=77)
    expect(second.get_by_role("row").filter(has_text="quill").first).to_contain_text("77")
    assert (len(of_first), len(of_second), asked) == (1, 0, [])
    first.close()
    beats(product, running=88)
    expect(second.get_by_role("row").filter(has_text="quill").first).to_contain_text("88")
    assert len(of_second) == 1
