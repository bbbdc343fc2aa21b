"""The pages that look inside, before the product's own application and a real engine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.console.browser.tabs import Tabs
from tests.console.live import LiveServer
from tests.console.relay import relayed

Go = Callable[..., Page]


@pytest.fixture(scope="module")
def tabs(browser: Browser, product: LiveServer, sessions: dict[str, Any]) -> Iterator[Tabs]:
    """At the product's own application."""
    tabs = Tabs(browser, sessions, product.url)
    yield tabs
    tabs.close()


@pytest.fixture
def go(product: LiveServer, tabs: Tabs) -> Iterator[Go]:
    """Opens a path as somebody."""

    def open_path(path: str, name: str = "root", base_url: str = product.url) -> Page:
        page = tabs.of(name, {}).page
        page.goto(base_url + path)
        return page

    yield open_path
    tabs.tidy()


def prove(page: Page, other: str) -> None:
    page.get_by_label("First").select_option("acme")
    page.get_by_label("Other tenant").select_option(other)
    page.get_by_role("button", name="Prove isolation").click()


def test_a_button_proves_isolation_and_leads_to_the_stories(go: Go) -> None:
    page = go("/console/kv/")
    prove(page, "rival")
    proof = page.locator(".proof-verdict")
    expect(proof).to_have_attribute("data-verdict", "isolated", timeout=60_000)
    rows = page.locator("#proof-result tbody tr")
    expect(rows).to_have_count(4)
    cached = [int(text.split()[0]) for text in rows.locator("td:nth-child(3)").all_inner_texts()]
    assert [count > 0 for count in cached] == [False, True, False, True]
    # What the two tenants have in the cache is on the map, beside the button.
    expect(page.locator("#kv-tenants")).to_contain_text("rival")
    expect(page.locator("#kv-legend")).to_contain_text("acme")
    page.locator("#kv-cells").hover(position={"x": 6, "y": 6})
    expect(page.locator("#kv-cell")).to_contain_text(re.compile(r"Block \d+ of 16 tokens"))
    second = rows.nth(1).get_by_role("link")
    second.click()
    page.wait_for_url("**/console/requests/**")
    events = page.locator(".events")
    deadline = time.monotonic() + 60
    while events.count() == 0:  # records are written a second after their requests
        assert time.monotonic() < deadline, "the request has no record"
        page.wait_for_timeout(500)
        page.reload()
    expect(events).to_contain_text("Cache hit")
    expect(events).to_contain_text("Sent to a replica")


def test_a_tenants_map_names_nobody_else(go: Go, product: LiveServer) -> None:
    root = go("/console/kv/")
    prove(root, "rival")
    expect(root.locator(".proof-verdict")).to_have_attribute(
        "data-verdict", "isolated", timeout=60_000
    )
    page = go("/console/kv/", "ada")
    expect(page.locator("#kv-state")).to_have_text("Live")
    expect(page.locator("#kv-tenants")).to_contain_text("acme")
    expect(page.locator("#kv-sums")).to_contain_text("Others' or empty")
    assert "rival" not in page.content()
    text = page.request.get(f"{product.url}/api/blocks/r1/?tenant=acme").text()
    assert '"acme"' in text
    assert "rival" not in text
    assert page.request.get(f"{product.url}/api/blocks/r1/?tenant=rival").status == 404
    prove(page, "")
    expect(page.locator(".proof-verdict")).to_have_attribute(
        "data-verdict", "isolated", timeout=60_000
    )
    expect(page.locator(".proof-verdict")).to_contain_text("An unused namespace sent")


def test_a_map_that_is_cut_off_comes_back(go: Go, product: LiveServer) -> None:
    with relayed(product) as relay:
        page = go("/console/kv/", base_url=relay.url)
        expect(page.locator("#kv-state")).to_have_text("Live")
        relay.stop()
        expect(page.locator("#kv-state")).to_contain_text("Connection lost")
        relay.start()
        expect(page.locator("#kv-state")).to_have_text("Live")
