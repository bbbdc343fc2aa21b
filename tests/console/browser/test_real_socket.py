"""The page before the product's own socket: `config.asgi`, a gateway, and a replica in Redis."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, WebSocketRoute, expect

from engine.contract.protocol import EngineRequest
from engine.text import load_tokenizer
from tests.console.browser.conftest import Sessions, log_in
from tests.console.browser.playground import PlaygroundPage
from tests.console.live import ROOT, LiveServer
from tests.inference.scripted import ScriptedReplica
from tests.inference.tokenizer_folder import EOS, write_tokenizer

TRICK = "<script>window.hit = 1</script> [x](javascript:window.hit=1) **bold**"


class ReplicaThread:
    """A scripted replica with an event loop of its own."""

    def __init__(self, redis_url: str, prefix: str, folder: Path) -> None:
        tokenizer = load_tokenizer(folder)

        def script(request: EngineRequest, index: int) -> list[int]:
            prompt = tokenizer.decode(request.prompt_token_ids)
            text = TRICK if "trick" in prompt else "Hello from the replica."
            if "long" in prompt:
                text = "and so on " * 300
            if "middling" in prompt:
                text = "and so on " * 40
            return tokenizer.encode(text, add_special_tokens=False)

        self.replica = ScriptedReplica(
            redis_url,
            script,
            key_prefix=prefix,
            model_name="quill",
            model_path=str(folder),
            vocab_size=512,
            eos_token_ids=(EOS,),
            max_model_len=4096,
            token_delay=0.01,
        )
        self.loop = asyncio.new_event_loop()
        self.ended = asyncio.Event()
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(self.run(),))

    async def run(self) -> None:
        async with self.replica:
            await self.ended.wait()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.ended.set)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture(scope="module")
def replica(instance: dict[str, str], tmp_path_factory: Any) -> Iterator[ReplicaThread]:
    """A replica of "quill", under a prefix without the other tests' heartbeats."""
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    prefix = instance["QUIRE_KEY_PREFIX"] + "real"
    running = ReplicaThread(instance["REDIS_URL"], prefix, folder)
    running.thread.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def product(
    instance: dict[str, str], replica: ReplicaThread, tmp_path_factory: Any
) -> Iterator[LiveServer]:
    """The product's ASGI application under uvicorn."""
    env = instance | {"QUIRE_KEY_PREFIX": replica.replica.prefix}
    log = tmp_path_factory.mktemp("product") / "log"
    running = LiveServer("config.asgi:application", env, log, lifespan="on")
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """One whose cache has the playground's scripts after the first test."""
    made = browser.new_context()
    yield made
    made.close()


@pytest.fixture
def page(context: BrowserContext, product: LiveServer, sessions: Sessions) -> Iterator[Page]:
    """Logged in as Ada: sessions are in the database that both servers share."""
    context.add_cookies(sessions["ada"]["cookies"])
    opened = context.new_page()
    opened.goto(product.url)
    yield opened
    opened.evaluate("localStorage.clear()")
    opened.close()


@pytest.fixture
def playground(page: Page) -> PlaygroundPage:
    return PlaygroundPage(page).ready()


def test_a_message_is_answered_by_the_replica(playground: PlaygroundPage) -> None:
    expect(playground.page.get_by_role("combobox", name="Model")).to_contain_text("ready")
    answer = playground.answer_to("Hi")
    expect(answer.locator(".prose")).to_have_text("Hello from the replica.")
    figures = answer.locator(".colophon")
    for pattern in (r"\d+ tokens", r"[\d.,]+ tok/s", r"first after [\d.]+ m?s", r"prompt \d+"):
        expect(figures).to_contain_text(re.compile(pattern))


def test_settings_reach_the_engine(playground: PlaygroundPage, replica: ReplicaThread) -> None:
    values = {"temperature": "0.3", "top_k": "7", "max_tokens": "5", "seed": "11", "stop": "END"}
    for name, value in values.items():
        playground.page.locator(f"#s-{name}").fill(value)
    playground.page.get_by_label("System prompt").fill("You are a long poem.")
    answer = playground.answer_to("Go on")
    sampling = replica.replica.received[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.3, 7, 11)
    expect(answer.locator(".colophon")).to_contain_text("5 tokens")
    expect(answer.locator(".ending")).to_have_text("cut at the length limit")


def test_stopping_aborts_the_request_in_the_engine(
    playground: PlaygroundPage, replica: ReplicaThread
) -> None:
    answer = playground.send("a long one")
    expect(answer.locator(".prose")).to_contain_text("and so on and so on")
    playground.page.get_by_role("button", name="Stop").click()
    playground.finished(answer)
    expect(answer).to_have_attribute("data-state", "stopped")
    deadline = 200
    while replica.replica.running and deadline:
        playground.page.wait_for_timeout(50)
        deadline -= 1
    assert replica.replica.running == {}


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
    playground: PlaygroundPage, browser: Browser, product: LiveServer
) -> None:
    """Within seconds, and the page says why."""
    other = browser.new_context()
    tab = other.new_page()
    log_in(tab, product.url, "olga")
    olga = PlaygroundPage(tab).ready()
    running = olga.send("a long one")
    expect(running.locator(".prose")).to_contain_text("and so on")
    state = other.storage_state()
    again = browser.new_context(storage_state=state)
    second = again.new_page()
    second.goto(product.url)
    second.get_by_label("Account: olga").click()
    second.get_by_role("button", name="Log out").click()
    second.wait_for_url(f"{product.url}/login/")
    expect(tab.locator("#connection")).to_contain_text("Your session has ended")
    again.close()
    other.close()


def test_a_user_without_a_tenant_is_told_so(browser: Browser, product: LiveServer) -> None:
    context = browser.new_context()
    page = context.new_page()
    log_in(page, product.url, "nobody")
    expect(page.locator("#connection")).to_contain_text("in no active tenant")
    expect(page.get_by_text("No model that you may use is loaded yet")).to_be_visible()
    context.close()


def test_an_api_path_answers_in_json_and_a_page_in_html(page: Page, product: LiveServer) -> None:
    api = page.request.get(f"{product.url}/v1/no/such/endpoint")
    assert api.status == 404
    assert "error" in api.json()
    html = page.request.get(f"{product.url}/no/such/page", headers={"Accept": "text/html"})
    assert html.status == 404
    assert "No such page" in html.text()


def test_an_answer_goes_on_after_its_connection_broke(
    playground: PlaygroundPage, replica: ReplicaThread
) -> None:
    """Nothing is lost and nothing comes twice, and nobody has to ask again."""
    page = playground.page
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
    page.reload()
    playground.ready()
    answer = playground.finished(playground.send("a middling one"))
    assert cut == [True]
    expect(answer).to_have_attribute("data-state", "done")
    assert answer.locator(".prose").inner_text().split() == ["and", "so", "on"] * 40
    expect(playground.error).to_have_count(0)


def test_the_code_of_what_was_asked_runs_as_it_is_shown(
    playground: PlaygroundPage, instance: dict[str, str], tmp_path: Path
) -> None:
    page = playground.page
    made = subprocess.run(
        [sys.executable, "manage.py", "create_key", "--tenant", "acme"],
        cwd=ROOT,
        env=instance,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    key = re.search(r"sk-quire-\w+", made.stdout)
    assert key is not None
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
            env={"PATH": os.environ["PATH"], "QUIRE_API_KEY": key[0], "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, (language, text, done.stderr)
        said = "".join(re.findall(r'"content":"([^"]*)"', done.stdout)) or done.stdout.strip()
        assert said == "Hello from the replica.", (language, done.stdout)


def test_a_reload_in_the_middle_of_an_answer_goes_on_with_it(playground: PlaygroundPage) -> None:
    answer = playground.send("a middling one")
    expect(answer.locator(".prose")).to_contain_text("and so on and so on")
    playground.page.reload()
    answer = playground.answers.first
    playground.finished(answer)
    expect(answer).to_have_attribute("data-state", "done")
    expect(answer.locator(".prose")).to_have_text(" ".join(["and so on"] * 40))
    expect(playground.error).to_have_count(0)
