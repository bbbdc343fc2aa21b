"""A real browser before a live server.

Everything here lives as long as this package's tests and no longer: while Playwright's loop runs in
the main thread, Django's database and asyncio tests can't.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from engine.contract import protocol
from engine.contract.protocol import Heartbeat
from tests.console.beats import heartbeat
from tests.console.browser.playground import PlaygroundPage
from tests.console.live import ROOT, LiveServer, environment
from tests.console.seed import PASSWORD
from tests.database import with_tables
from tests.engine.replica import Gateway, replica

#: The build without windows costs a third of the other's processor time.
BUILDS = ("/usr/bin/chromium-headless-shell", "/usr/bin/chromium")
CHROMIUM = os.environ.get("QUIRE_TEST_CHROMIUM") or next(filter(os.path.exists, BUILDS), BUILDS[0])
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
#: Half of what the product takes for recent (allauth's ACCOUNT_REAUTHENTICATION_TIMEOUT, 300 s).
FRESH_S = 150
Open = Callable[..., Page]
expect.set_options(timeout=60_000)  # a busy machine is no fault of the page's


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    if not Path(CHROMIUM).exists():
        if os.environ.get("QUIRE_TEST_REQUIRE_SERVICES"):
            pytest.fail(f"{CHROMIUM} is missing, and QUIRE_TEST_REQUIRE_SERVICES is set.")
        pytest.skip(
            f"{CHROMIUM} is missing (apt-get install chromium-headless-shell fonts-dejavu-core)."
        )
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="package")
def instance(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of an instance with `tests.console.rows` in its database."""
    data_dir = with_tables(tmp_path_factory.mktemp("instance"))
    env = environment(data_dir, redis_url, f"c{uuid.uuid4().hex[:12]}")
    subprocess.run(
        [sys.executable, "-m", "tests.console.seed"], cwd=ROOT, env=env, check=True, timeout=300
    )
    return env


@pytest.fixture(scope="package")
def beat(instance: dict[str, str]) -> Iterator[Callable[[Heartbeat], None]]:
    """Puts a heartbeat that stays into the instance's Redis."""
    client: Any = redis.Redis.from_url(instance["REDIS_URL"])
    prefix = instance["QUIRE_KEY_PREFIX"]

    def write(beat: Heartbeat) -> None:
        client.sadd(protocol.replicas_key(prefix), beat.replica_id)
        key = protocol.replica_key(beat.replica_id, prefix)
        client.set(key, protocol.encode(beat), px=86_400_000)

    yield write
    client.close()


@pytest.fixture(scope="package")
def server(
    instance: dict[str, str], beat: Callable[[Heartbeat], None], tmp_path_factory: Any
) -> Iterator[LiveServer]:
    """The console, whose playground socket plays scripts (`tests.console.scripted_asgi`)."""
    beat(heartbeat("quill-0"))
    beat(heartbeat("acme-0", "acme-private", "loading", load_progress=0.4))
    log = tmp_path_factory.mktemp("server") / "log"
    running = LiveServer("tests.console.scripted_asgi:application", instance, log)
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="package")
def product(instance: dict[str, str], tmp_path_factory: Any) -> Iterator[LiveServer]:
    """`config.asgi` under uvicorn, and a replica of the demo model called "quill"."""
    prefix = instance["QUIRE_KEY_PREFIX"] + "product"
    flags = ("--served-model-name", "quill", "--max-model-len", "1024")
    with replica(instance["REDIS_URL"], prefix, ROOT / "demo" / "model", *flags):
        Gateway(instance["REDIS_URL"], prefix).await_state("ready")
        log = tmp_path_factory.mktemp("product") / "log"
        env = instance | {"QUIRE_KEY_PREFIX": prefix}
        running = LiveServer("config.asgi:application", env, log, lifespan="on")
        running.start()
        yield running
        running.stop()


def log_in(page: Page, url: str, name: str) -> None:
    """Through the login page, as a person does."""
    page.goto(f"{url}/login/")
    page.get_by_label("Username or mail address").fill(name)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{url}/")


class Sessions:
    """Cookies of users who logged in within the last minutes, by name.

    Not every test logs in, yet none meets a log-in so old that the product asks for it again.
    """

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        self._url = url
        self._found: dict[str, tuple[float, Any]] = {}

    def __getitem__(self, name: str) -> Any:
        at, state = self._found.get(name, (-math.inf, None))
        if time.monotonic() - at > FRESH_S:
            context = self._browser.new_context()
            log_in(context.new_page(), self._url, name)
            at, state = time.monotonic(), context.storage_state()
            self._found[name] = at, state
            context.close()
        return state


@pytest.fixture(scope="package")
def sessions(browser: Browser, server: LiveServer) -> Sessions:
    """Whoever is named is logged in."""
    return Sessions(browser, server.url)


class Contexts:
    """Shared between tests by user and way of looking: their caches spare loading scripts anew."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._made: dict[tuple[str, str], BrowserContext] = {}

    def of(self, user: str, options: dict[str, Any]) -> BrowserContext:
        """The user's, without the cookies of a login."""
        key = user, repr(sorted(options.items()))
        if key not in self._made:
            self._made[key] = self._browser.new_context(**options)
        return self._made[key]

    def close(self) -> None:
        """All of them."""
        for context in self._made.values():
            context.close()


@pytest.fixture(scope="package")
def contexts(browser: Browser) -> Iterator[Contexts]:
    """For all tests of this package."""
    made = Contexts(browser)
    yield made
    made.close()


@pytest.fixture
def open_page(
    browser: Browser,
    server: LiveServer,
    sessions: Sessions,
    contexts: Contexts,
) -> Iterator[Open]:
    """Opens a page as a user, in a tab of its own; as nobody, or without scripts, which can't tidy
    up behind them, in a context of its own.

    `answers`: JSON that addresses answer with instead of the server. A script's error or a refused
    policy fails the test.
    """
    opened: list[Page | BrowserContext] = []
    problems: list[str] = []

    def make(
        path: str = "/",
        user: str | None = "ada",
        *,
        answers: dict[str, Any] | None = None,
        **options: Any,
    ) -> Page:
        options = {"viewport": DESKTOP, "color_scheme": "light"} | options
        if user and options.get("java_script_enabled", True):
            context = contexts.of(user, options)
            context.add_cookies(sessions[user]["cookies"])
        else:
            state = sessions[user] if user else None
            context = browser.new_context(storage_state=state, **options)
            opened.append(context)
        context.set_default_timeout(60_000)
        page = context.new_page()
        opened.append(page)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: _note(message, problems))
        for address, answer in (answers or {}).items():
            page.route(f"**{address}*", partial(_fulfil, answer))
        page.goto(server.url + path)
        return page

    yield make
    for each in opened:
        if isinstance(each, Page):
            for page in each.context.pages:
                page.evaluate("localStorage.clear()")
                page.close()
        else:
            each.close()
    assert problems == []


def _fulfil(answer: Any, route: Route) -> None:
    route.fulfill(json=answer)


def _note(message: Any, problems: list[str]) -> None:
    if "Content Security Policy" in message.text or "TrustedHTML" in message.text:
        problems.append(message.text)


@pytest.fixture
def playground(open_page: Open) -> PlaygroundPage:
    """The playground, ready for a first message."""
    return PlaygroundPage(open_page()).ready()
