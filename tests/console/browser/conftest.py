"""A real browser before a live server.

Everything here lives as long as this package's tests and no longer: while Playwright's loop runs in
the main thread, Django's database and asyncio tests can't.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.messages import Heartbeat
from tests.console.beats import heartbeat
from tests.console.browser.playground import PlaygroundPage
from tests.console.browser.scripted_replica import ReplicaThread
from tests.console.browser.tabs import NOTHING, Tab, Tabs
from tests.console.live import ROOT, LiveServer, environment
from tests.console.oidc_provider import CLIENT, SECRET, Provider
from tests.console.seed import PASSWORD
from tests.database import with_tables
from tests.engine.replica import Gateway, replica
from tests.inference.tokenizer_folder import write_tokenizer

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
Open = Callable[..., Page]
expect.set_options(timeout=60_000)  # a busy machine is no fault of the page's


def expect_no_overflow(page: Page) -> None:
    """The page isn't wider than its window once it's laid out, which takes a while."""
    page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")


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


class Seeded(NamedTuple):
    """The environment of an instance with rows, who is logged in there by name, and a key."""

    instance: dict[str, str]
    sessions: dict[str, Any]
    key: str


@pytest.fixture(scope="package")
def seeded(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Seeded:
    """What `tests.console.seed` makes."""
    data_dir = with_tables(tmp_path_factory.mktemp("instance"))
    env = environment(data_dir, redis_url, f"c{uuid.uuid4().hex[:12]}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.console.seed"],
        cwd=ROOT,
        env=env,
        check=True,
        timeout=300,
        stdout=subprocess.PIPE,
    )
    payload = json.loads(done.stdout)
    return Seeded(env, states_of(payload["sessions"]), payload["key"])


@pytest.fixture(scope="package")
def instance(seeded: Seeded) -> dict[str, str]:
    """The environment of an instance with `tests.console.rows` in its database."""
    return seeded.instance


@pytest.fixture(scope="package")
def sessions(seeded: Seeded) -> dict[str, Any]:
    """By name, what a browser has kept of somebody who is logged in at the instance."""
    return seeded.sessions


def states_of(cookies: dict[str, str]) -> dict[str, Any]:
    """The same of names and their session cookies as name=value."""
    states = {}
    for user, text in cookies.items():
        name, _, value = text.partition("=")
        cookie = {"name": name, "value": value, "domain": "127.0.0.1", "path": "/"}
        states[user] = {"cookies": [cookie]}
    return states


@pytest.fixture(scope="package")
def beat(instance: dict[str, str]) -> Iterator[Callable[[Heartbeat], None]]:
    """Puts a heartbeat that stays into the instance's Redis."""
    client: Any = redis.Redis.from_url(instance["REDIS_URL"])
    prefix = instance["QUIRE_KEY_PREFIX"]

    def write(beat: Heartbeat) -> None:
        client.sadd(redis_keys.replicas_key(prefix), beat.replica_id)
        key = redis_keys.replica_key(beat.replica_id, prefix)
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


@pytest.fixture(scope="package")
def provider() -> Iterator[Provider]:
    """An identity provider of the site's own."""
    running = Provider()
    yield running
    running.close()


@pytest.fixture(scope="package")
def scripted(instance: dict[str, str], tmp_path_factory: Any) -> Iterator[ReplicaThread]:
    """A replica of "quill", under a prefix without the other tests' heartbeats."""
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    running = ReplicaThread(instance["REDIS_URL"], instance["QUIRE_KEY_PREFIX"] + "site", folder)
    running.thread.start()
    yield running
    running.stop()


@pytest.fixture(scope="package")
def site(
    instance: dict[str, str], scripted: ReplicaThread, provider: Provider, tmp_path_factory: Any
) -> Iterator[LiveServer]:
    """`config.asgi` under uvicorn, an identity provider, and a replica that plays scripts."""
    env = {
        **instance,
        "QUIRE_KEY_PREFIX": scripted.replica.prefix,
        "QUIRE_OIDC_ISSUER": provider.url,
        "QUIRE_OIDC_CLIENT_ID": CLIENT,
        "QUIRE_OIDC_CLIENT_SECRET": SECRET,
        "QUIRE_OIDC_NAME": "Acme ID",
        "QUIRE_OIDC_ROLES": "devs=acme:member",
    }
    log = tmp_path_factory.mktemp("site") / "log"
    running = LiveServer("config.asgi:application", env, log, lifespan="on")
    running.start()
    yield running
    running.stop()


def log_in(page: Page, url: str, name: str) -> None:
    """Through the login page, as a person does."""
    page.goto(f"{url}/login/")
    page.get_by_label("Username or email address").fill(name)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{url}/")


@pytest.fixture(scope="package")
def tabs(browser: Browser, server: LiveServer, sessions: dict[str, Any]) -> Iterator[Tabs]:
    """For all tests of this package."""
    tabs = Tabs(browser, sessions, server.url)
    yield tabs
    tabs.close()


@pytest.fixture
def open_page(
    browser: Browser, server: LiveServer, sessions: dict[str, Any], tabs: Tabs
) -> Iterator[Open]:
    """Opens a page as a user, in a tab that other tests use, too, or in its own if it's `alone`,
    for what can't be taken back; as nobody, or without scripts, in a context of its own.

    `answers`: JSON that addresses answer with instead of the server. A script's error or a refused
    policy fails the test.
    """
    opened: list[Tab] = []

    def make(
        path: str = "/",
        user: str | None = "ada",
        *,
        answers: dict[str, Any] | None = None,
        isolated: bool = False,
        viewport: Any = DESKTOP,
        color_scheme: str = "light",
        reduced_motion: str = "no-preference",
        **device: Any,
    ) -> Page:
        if user and device.get("java_script_enabled", True):
            tab = tabs.of(user, device, isolated)
        else:
            state = sessions[user] if user else None
            tab = Tab(browser.new_context(storage_state=state, **device))
            opened.append(tab)
        tab.set_viewport(viewport, color_scheme=color_scheme, reduced_motion=reduced_motion)
        tab.problems.clear()  # what an earlier test's page said when it was left
        for address, answer in (answers or {}).items():
            tab.page.route(f"**{address}*", partial(_fulfil, answer))
        if "#" in path:  # to go to another place of a page loads nothing
            tab.page.goto(server.url + NOTHING)
        tab.page.goto(server.url + path)
        return tab.page

    yield make
    problems = tabs.tidy()
    for tab in opened:
        tab.page.context.close()
        problems += tab.problems
    assert problems == []


def _fulfil(answer: Any, route: Route) -> None:
    route.fulfill(json=answer)


@pytest.fixture
def playground(open_page: Open) -> PlaygroundPage:
    """The playground, ready for a first message."""
    return PlaygroundPage(open_page()).ready()
