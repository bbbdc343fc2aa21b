"""The page before the product's own socket: `config.asgi`, a gateway, and a replica in Redis."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, WebSocketRoute, expect

from tests.console.browser.conftest import Seeded, log_in
from tests.console.browser.playground import PlaygroundPage
from tests.console.browser.scripted_replica import TRICK, ReplicaThread
from tests.console.browser.tabs import Tab
from tests.console.live import ROOT, LiveServer


@pytest.fixture(scope="module")
def tab(browser: Browser, sessions: dict[str, Any]) -> Iterator[Tab]:
    """Ada's: sessions are in the database that all servers share."""
    tab = Tab(browser.new_context(storage_state=sessions["ada"]))
    yield tab
    tab.page.context.close()


@pytest.fixture
def page(tab: Tab, site: LiveServer) -> Iterator[Page]:
    """The playground."""
    tab.page.goto(site.url)
    yield tab.page
    tab.tidy()


@pytest.fixture
def playground(page: Page) -> PlaygroundPage:
    return PlaygroundPage(page).ready()


def test_a_message_is_answered_by_the_replica(playground: PlaygroundPage) -> None:
    expect(playground.page.get_by_role("combobox", name="Model")).to_contain_text("ready")
    answer = playground.answer_to("Hi")
    expect(answer.locator(".prose")).to_have_text("Hello from the replica.")
    figures = answer.locator(".colophon")
    for pattern in (r"\d+ tokens", r"first after [\d.]+ m?s", r"prompt \d+"):
        expect(figures).to_contain_text(re.compile(pattern))


def test_settings_reach_the_engine(playground: PlaygroundPage, scripted: ReplicaThread) -> None:
    values = {"temperature": "0.3", "top_k": "7", "max_tokens": "5", "seed": "11", "stop": "END"}
    for name, value in values.items():
        playground.page.locator(f"#s-{name}").fill(value)
    playground.page.get_by_label("System prompt").fill("You are a long poem.")
    answer = playground.answer_to("Go on")
    sampling = scripted.replica.received[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.3, 7, 11)
    expect(answer.locator(".colophon")).to_contain_text("5 tokens")
    expect(answer.locator(".ending")).to_have_text("cut at the length limit")


def test_stopping_aborts_the_request_in_the_engine(
    playground: PlaygroundPage, scripted: ReplicaThread
) -> None:
    answer = playground.send("a long one")
    expect(answer.locator(".prose")).to_contain_text("and so on and so on")
    playground.page.get_by_role("button", name="Stop").click()
    playground.finished(answer)
    expect(answer).to_have_attribute("data-state", "stopped")
    deadline = time.monotonic() + 60
    while scripted.replica.running and time.monotonic() < deadline:
        playground.page.wait_for_timeout(50)
    assert scripted.replica.running == {}


def test_fault_37_the_models_tokens_are_text(playground: PlaygroundPage) -> None:
    prose = playground.answer_to("a trick").locator(".prose")
    text = prose.evaluate("e => e.textContent")
    assert text == TRICK.replace("**", "")
    assert prose.locator("script, a").count() == 0
    expect(prose.locator("strong")).to_have_text("bold")
    assert playground.page.evaluate("window.hit") is None


def test_an_error_of_the_gateway_is_shown_with_its_code(playground: PlaygroundPage) -> None:
    playground.finished(playground.send("word " * 4000))
    expect(playground.error).to_contain_text("context_length_exceeded")


def test_fault_38_logging_out_elsewhere_closes_the_socket(
    playground: PlaygroundPage, browser: Browser, site: LiveServer
) -> None:
    """Within seconds, and the page says why."""
    other = browser.new_context()
    tab = other.new_page()
    log_in(tab, site.url, "olga")
    olga = PlaygroundPage(tab).ready()
    running = olga.send("a long one")
    expect(running.locator(".prose")).to_contain_text("and so on")
    state = other.storage_state()
    again = browser.new_context(storage_state=state)
    second = again.new_page()
    second.goto(site.url)
    second.get_by_label("Account: olga").click()
    second.get_by_role("button", name="Log out").click()
    second.wait_for_url(f"{site.url}/login/")
    expect(tab.locator("#connection")).to_contain_text("Your session has ended")
    again.close()
    other.close()


def test_a_user_without_a_tenant_is_told_so(
    browser: Browser, site: LiveServer, sessions: dict[str, Any]
) -> None:
    context = browser.new_context(storage_state=sessions["nobody"])
    page = context.new_page()
    page.goto(site.url)
    expect(page.locator("#connection")).to_contain_text("in no active tenant")
    expect(page.get_by_text("No model that you may use is loaded yet")).to_be_visible()
    context.close()


def test_an_api_path_answers_in_json_and_a_page_in_html(page: Page, site: LiveServer) -> None:
    api = page.request.get(f"{site.url}/v1/no/such/endpoint")
    assert api.status == 404
    assert "error" in api.json()
    html = page.request.get(f"{site.url}/no/such/page", headers={"Accept": "text/html"})
    assert html.status == 404
    assert "No such page" in html.text()


def test_an_answer_goes_on_after_its_connection_broke(tab: Tab, site: LiveServer) -> None:
    """Nothing is lost and nothing comes twice, and nobody has to ask again."""
    page = tab.page.context.new_page()  # the way of its socket can't be changed back
    cut: list[bool] = []

    def between(route: WebSocketRoute) -> None:
        upstream = route.connect_to_server()
        frames: list[object] = []

        def pass_on(message: str | bytes) -> None:
            frames.append(message)
            route.send(message)
            if len(frames) == 40 and not cut:
                cut.append(True)
                route.close(code=1012)

        upstream.on_message(pass_on)

    page.route_web_socket("**/ws/playground/", between)
    page.goto(site.url)
    playground = PlaygroundPage(page).ready()
    answer = playground.finished(playground.send("a middling one"))
    assert cut == [True]
    expect(answer).to_have_attribute("data-state", "done")
    assert answer.locator(".prose").inner_text().split() == ["and", "so", "on"] * 40
    expect(playground.error).to_have_count(0)
    page.close()


def test_the_code_of_what_was_asked_runs_as_it_is_shown(
    playground: PlaygroundPage, seeded: Seeded, tmp_path: Path
) -> None:
    page = playground.page
    page.locator("#s-top_k").fill("7")
    page.get_by_label("System prompt").fill("Quote \"'$HOME' and `ls`.\nJSON")
    playground.answer_to("Grüße 🙂 \\n")
    page.locator("#code-toggle").click()
    clients = ROOT / "tests/clients/node"
    runs = {"curl": ["bash"], "Python": [sys.executable, "-"], "JavaScript": ["node", "-"]}
    runs["JavaScript"] = ["node", "--input-type=module", "-"]
    for language, program in runs.items():
        page.locator("#code").get_by_role("button", name=language, exact=True).click()
        text = page.locator("#code code").inner_text()
        assert "sk-quire" not in text
        done = subprocess.run(
            program,
            input=text,
            cwd=clients,
            env={"PATH": os.environ["PATH"], "QUIRE_API_KEY": seeded.key, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, (language, text, done.stderr)
        output = "".join(re.findall(r'"content":"([^"]*)"', done.stdout)) or done.stdout.strip()
        assert output == "Hello from the replica.", (language, done.stdout)


def test_a_reload_in_the_middle_of_an_answer_goes_on_with_it(playground: PlaygroundPage) -> None:
    answer = playground.send("a middling one")
    expect(answer.locator(".prose")).to_contain_text("and so on and so on")
    playground.page.reload()
    answer = playground.answers.first
    playground.finished(answer)
    expect(answer).to_have_attribute("data-state", "done")
    expect(answer.locator(".prose")).to_have_text(" ".join(["and so on"] * 40))
    expect(playground.error).to_have_count(0)
