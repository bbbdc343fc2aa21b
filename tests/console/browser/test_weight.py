"""How files leave the server. What whole pages weigh, `test_every_page` measures."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Browser

from tests.console.live import LiveServer


def test_texts_leave_compressed_and_are_known_again(server: LiveServer, browser: Browser) -> None:
    context = browser.new_context()
    request = context.request
    for path, kind in (
        ("/static/console/css/tokens.css", "text/css"),
        ("/static/console/vendor/markdown-it.mjs", "javascript"),
        ("/login/", "text/html"),
    ):
        packed = request.get(server.url + path, headers={"Accept-Encoding": "gzip"})
        baseline_response = request.get(server.url + path, headers={"Accept-Encoding": "identity"})
        assert kind in packed.headers["content-type"]
        assert packed.headers["content-encoding"] == "gzip"
        assert "content-encoding" not in baseline_response.headers
        assert "Accept-Encoding" in packed.headers["vary"]
        assert int(packed.headers["content-length"]) < len(baseline_response.body()) * 0.7
        if "static" in path:
            assert packed.body() == baseline_response.body()
            again = {"If-None-Match": packed.headers["etag"], "Accept-Encoding": "gzip"}
            assert request.get(server.url + path, headers=again).status == 304
    context.close()


def test_the_modules_of_the_playground_are_asked_for_at_once(
    server: LiveServer, browser: Browser, sessions: dict[str, Any]
) -> None:
    context = browser.new_context(storage_state=sessions["ada"])
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    page.wait_for_selector("[data-models=known]")
    modules = {url for url in asked if re.search(r"\.m?js$", url)}
    named = page.eval_on_selector_all(
        "link[rel=modulepreload], script[src]", "all => all.map(one => one.href || one.src)"
    )
    context.close()
    assert modules == set(named)
