"""Live pages before the product's own socket and a real layer and who hears what."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from playwright.sync_api import Browser, BrowserContext, Page, expect

from engine.contract import messages as protocol
from engine.contract import redis_keys
from tests.console.beats import heartbeat
from tests.console.browser.conftest import DESKTOP
from tests.console.live import LiveServer


@pytest.fixture
def context(browser: Browser, sessions: dict[str, Any]) -> Iterator[BrowserContext]:
    context = browser.new_context(storage_state=sessions["root"], viewport=DESKTOP)
    context.set_default_timeout(60_000)
    yield context
    context.close()


@pytest.fixture
def beats(site: LiveServer) -> Iterator[Callable[[int], None]]:
    """Puts the heartbeat of a replica of "rival-private" that runs so many into Redis."""
    client: Any = redis.Redis.from_url(site.env["REDIS_URL"])
    prefix = site.env["QUIRE_KEY_PREFIX"]
    key = redis_keys.replica_key("rival-0", prefix)

    def write(running: int, state: str = "ready") -> None:
        stats = {"num_requests_running": running}
        beat = heartbeat("rival-0", "rival-private", state, at=time.time(), stats=stats)
        client.sadd(redis_keys.replicas_key(prefix), "rival-0")
        client.set(key, protocol.encode(beat), px=600_000)

    yield write
    client.srem(redis_keys.replicas_key(prefix), "rival-0")
    client.delete(key)
    client.close()


def watched(context: BrowserContext, url: str) -> tuple[Page, list[str]]:
    """A page, and the addresses of the sockets that it opens."""
    page = context.new_page()
    sockets: list[str] = []
    page.on("websocket", lambda socket: sockets.append(socket.url))
    page.goto(url)
    return page, sockets


def test_two_tabs_share_a_socket_and_the_second_takes_it_over(
    context: BrowserContext, site: LiveServer, beats: Callable[[int], None]
) -> None:
    beats(33)
    url = f"{site.url}/console/"
    first, of_first = watched(context, url)
    row = first.get_by_role("row").filter(has_text="rival-private").first
    expect(row).to_contain_text("33")
    first.wait_for_timeout(1000)
    second, of_second = watched(context, url)
    asked: list[str] = []
    second.on("request", lambda r: asked.append(r.url) if "api/overview" in r.url else None)
    second.wait_for_timeout(3000)  # its first question is answered; from now on the socket tells
    asked.clear()
    beats(77)
    expect(second.get_by_role("row").filter(has_text="rival-private").first).to_contain_text("77")
    assert (len(of_first), len(of_second), asked) == (1, 0, [])
    first.close()
    beats(88)
    expect(second.get_by_role("row").filter(has_text="rival-private").first).to_contain_text("88")
    assert len(of_second) == 1


#: Counts how often a notice was written anew with what it said before, which screen readers repeat.
COUNT_REPEATED = """(notice) => {
  let last = notice.innerHTML;
  window.repeated = 0;
  new MutationObserver(() => {
    if (notice.innerHTML === last) window.repeated += 1;
    last = notice.innerHTML;
  }).observe(notice, {childList: true, characterData: true, subtree: true});
}"""


def test_the_list_of_models_counts_live_requests_and_says_at_once_what_no_longer_serves(
    context: BrowserContext, site: LiveServer, beats: Callable[..., None]
) -> None:
    beats(33)
    page, _ = watched(context, f"{site.url}/console/models/")
    row, verdict = page.locator("[data-model=rival-private]"), page.locator("[data-verdict]")
    expect(row).to_contain_text("33 running")
    expect(verdict).not_to_contain_text("rival-private")
    beats(34)
    expect(row).to_contain_text("34 running")
    verdict.evaluate(COUNT_REPEATED)
    beats(35)
    expect(row).to_contain_text("35 running")
    assert page.evaluate("repeated") == 0
    beats(36, "failed")
    expect(row).to_contain_text("36 running")
    expect(verdict).to_contain_text("rival-private: failed since")
    beats(0)
    expect(row).to_contain_text("0 running")
    expect(verdict).not_to_contain_text("rival-private")
