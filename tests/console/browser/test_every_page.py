"""Every page of the product before its own application and a real engine, as each kind of reader.

With `QUIRE_TEST_SCREENSHOTS=docs/console` the operator's walk leaves a picture of each page there.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect

from console.navigation import Audience, pages
from tests.console.browser.conftest import DESKTOP, PHONE, states_of
from tests.console.browser.playground import PlaygroundPage
from tests.console.live import ROOT, LiveServer

SHOTS = os.environ.get("QUIRE_TEST_SCREENSHOTS")
#: What axe finds otherwise at another size: the rest is the same markup, and the contrasts of both
#: themes' colors are those of tests/console/test_contrast.py.
BY_VIEW = {"runOnly": ["scrollable-region-focusable"]}
#: Size, theme, and what axe looks for. A theme is colours alone, so that each size is seen in one.
View = tuple[Any, str, dict[str, Any]]
VIEWS: list[View] = [
    (DESKTOP, "light", {}),
    (PHONE, "dark", BY_VIEW),
]
#: All four, with all that axe looks for.
ALL_VIEWS: list[View] = [
    (size, theme, {}) for size in (DESKTOP, PHONE) for theme in ("light", "dark")
]
#: Of a first visit, with all that it loads: bodies as they are sent.
MAX_WEIGHT_BYTES = 290_000
#: The same of a later visit, where most comes from the browser's cache.
WEIGHT = """["navigation", "resource"].flatMap((kind) => performance.getEntriesByType(kind))
    .reduce((sum, each) => sum + each.encodedBodySize, 0)"""
#: Of what a page loads before anything is drawn, compressed, and how many files.
MAX_BLOCKING_BYTES, MAX_BLOCKING = 20_000, 7
IN_NAVIGATION = [f"/{page.address}" for page in pages() if page.has_view]
RESERVED = {
    f"/{page.address}" for page in pages() if page.who in (Audience.OPERATORS, Audience.STAFF)
}
#: Pages that no entry leads to.
BELOW = [
    *("/console/tenants/northwind/", "/account/password/", "/account/2fa/", "/account/sessions/"),
    *("/admin/tenants/tenant/", "/admin/tenants/tenant/1/change/", "/admin/tenants/user/"),
    "/admin/catalog/servedmodel/1/change/",
    "/no/such/page",
]
#: Where a page leads to what it lists.
LEADS = {
    "/console/requests/": 'tbody tr:has-text("200") a',
    "/console/models/": 'a[href*="/console/models/"]:text-is("quill")',
    "/console/batches/": 'tbody a[href*="/console/batches/"]',
}


@pytest.fixture(scope="module")
def secret(product: LiveServer, sessions: dict[str, Any]) -> str:
    """A key of Northwind's, which has asked this and that; its people are logged in."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.console.showcase"],
        cwd=ROOT,
        env=product.env,
        check=True,
        timeout=120,
        stdout=subprocess.PIPE,
    )
    payload = json.loads(done.stdout)
    sessions.update(states_of(payload["sessions"]))
    key = str(payload["secret"])
    with httpx.Client(
        base_url=f"{product.url}/v1", headers={"Authorization": f"Bearer {key}"}, timeout=60
    ) as client:
        work(client)
    return key


def work(client: httpx.Client) -> None:
    """Questions with a common beginning, one that is refused, a file and a batch."""
    system = {"role": "system", "content": "You answer briefly, in plain words. " * 6}

    def ask(question: str, model: str = "quill") -> int:
        messages = [system, {"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "max_tokens": 24}
        return client.post("/chat/completions", json=body).status_code

    topics = ("tides", "bees", "glaciers", "kites", "rivers", "lanterns")
    with ThreadPoolExecutor(6) as threads:
        assert set(threads.map(ask, [f"Tell me about {topic}." for topic in topics])) == {200}
    assert ask("Anybody there?", "no-such-model") == 404
    line = (
        '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",'
        ' "body": {"model": "quill", "messages": [{"role": "user", "content": "Hi"}]}}\n'
    )
    file = {"file": ("questions.jsonl", line, "application/jsonl")}
    file_id = client.post("/files", files=file, data={"purpose": "batch"}).json()["id"]
    batch = {
        "input_file_id": file_id,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    assert client.post("/batches", json=batch).status_code == 200


class Walk:
    """A reader's tab, and what went wrong in it."""

    def __init__(self, browser: Browser, url: str, cookies: Any, **options: Any) -> None:
        self.context: BrowserContext = browser.new_context(
            storage_state=cookies, reduced_motion="reduce", **options
        )
        self.context.set_default_timeout(60_000)
        self.page, self.url = self.context.new_page(), url
        self.path, self.problems = "", []
        self.page.on("pageerror", lambda error: self._record(str(error)))
        self.page.on(
            "console",
            lambda console_message: (
                "Policy" in console_message.text and self._record(console_message.text)
            ),
        )

    def _record(self, text: str) -> None:
        self.problems.append(f"{self.path}: {text}")

    def open(self, path: str) -> int:
        """Its status."""
        self.path = path
        response = self.page.goto(self.url + path)
        assert response is not None
        return response.status


#: Markup of Django's own forms: heads of columns that have no name, and a question mark.
DJANGOS = [".inline-group th:empty", ".help-tooltip"]


def violations(page: Page, asked: dict[str, Any]) -> list[str]:
    """What axe finds."""
    options = {"resultTypes": ["violations"], **asked}
    where = {"exclude": [[selector] for selector in DJANGOS]}
    violations = page.evaluate("([where, how]) => axe.run(where, how)", [where, options])[
        "violations"
    ]
    return [f"{violation['id']}: {violation['nodes'][0]['html'][:200]}" for violation in violations]


def picture(walk: Walk, name: str) -> None:
    """As WebP, which Playwright itself doesn't write: a folder of them stays small."""
    if SHOTS:
        devtools = walk.context.new_cdp_session(walk.page)
        shot = devtools.send("Page.captureScreenshot", {"format": "webp", "quality": 70})
        Path(SHOTS).mkdir(parents=True, exist_ok=True)
        (Path(SHOTS) / f"{name}.webp").write_bytes(base64.b64decode(shot["data"]))
        devtools.detach()


def name_of(path: str) -> str:
    """For a picture's file."""
    parts = [part for part in path.partition("?")[0].split("/") if part and part != "console"]
    # Ids differ from run to run.
    retained_parts = [part if len(part) < 15 else "one" for part in parts]
    return "-".join(retained_parts) or ("overview" if "console" in path else "playground")


#: What scripts size anew, such as charts, has its new size.
DRAWN = "new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)))"


def check_view(walk: Walk, axe: str, views: list[View]) -> None:
    """In each view nothing sticks out, and axe finds nothing."""
    page, path = walk.page, walk.path
    problems = list(walk.problems)
    page.evaluate(axe)
    for size, theme, asked in views:
        page.set_viewport_size(size)
        page.emulate_media(color_scheme=theme)
        page.evaluate(DRAWN)
        page.evaluate("document.getAnimations().forEach((each) => each.finish())")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (path, size)
        problems += [f"{path} {theme}: {violation}" for violation in violations(page, asked)]
        if views is VIEWS:
            picture(walk, f"{name_of(path)}-{'desk' if size == DESKTOP else 'phone'}")
    for width in (320, 768):
        page.set_viewport_size({"width": width, "height": 800})
        page.evaluate(DRAWN)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (path, width)
    page.set_viewport_size(DESKTOP)
    page.emulate_media(color_scheme="light")
    # What axe tries out itself, such as styles written into elements, is no fault of the page's.
    walk.problems = problems


def ready(walk: Walk, url: str) -> None:
    """What fills a page that begins empty has come."""
    page = walk.page
    expect(page.get_by_role("heading", level=1).first).to_be_attached()
    if walk.path == "/":
        PlaygroundPage(page).ready().answer_to("What is a glacier?")
    elif walk.path == "/console/":
        expect(page.locator("#pulse")).to_contain_text("Live")
        expect(page.get_by_role("article").first).to_be_visible()
    elif walk.path == "/console/kv/":
        expect(page.locator("#kv-state")).to_have_text("Live")
        expect(page.locator("#kv-legend")).to_contain_text("free")
    elif walk.path == "/console/keys/":
        page.locator(".row-actions summary").first.click()
    elif walk.path == "/console/settings/":
        page.get_by_label("Search").fill("per minute")
    elif walk.path == "/reference/":
        page.locator("#post-v1-chat-completions > summary").click()
        page.locator("#shape-Message > summary").click()
        # The rest looks the same, and axe would take half a minute for it.
        page.evaluate(
            "for (const each of [...document.querySelectorAll('details:not([open])')].slice(12))"
            " each.remove(); scrollTo(0, 0)"
        )


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "views",
    [
        pytest.param(VIEWS, id="two"),
        pytest.param(ALL_VIEWS, id="four", marks=pytest.mark.slow),
    ],
)
def test_the_operators_pages_are_light_and_readable_in_every_view(
    browser: Browser,
    product: LiveServer,
    sessions: dict[str, Any],
    secret: str,
    views: list[View],
) -> None:
    walk = Walk(browser, product.url, sessions["root"], viewport=DESKTOP)
    axe, heavy = Axe().axe_script, []
    waiting = [*IN_NAVIGATION, *BELOW]
    while waiting:
        path = waiting.pop(0)
        status = walk.open(path if "?" in path else f"{path}?tenant=northwind")
        walk.path = path
        assert status == (404 if path == "/no/such/page" else 200), path
        ready(walk, product.url)
        blocking = walk.page.evaluate(
            "performance.getEntriesByType('resource')"
            ".filter((each) => each.renderBlockingStatus === 'blocking')"
            ".map((each) => each.encodedBodySize)"
        )
        weight = walk.page.evaluate(WEIGHT)
        check_view(walk, axe, views)
        if not 5_000 < weight < MAX_WEIGHT_BYTES:
            heavy.append((path, weight))
        many = len(blocking) > MAX_BLOCKING or sum(blocking) > MAX_BLOCKING_BYTES
        if many and not path.startswith("/admin/"):  # Django's own forms bring jQuery and more
            heavy.append((path, blocking))
        if path in LEADS:
            href = walk.page.locator(LEADS[path]).first.get_attribute("href")
            waiting.append(str(href))
    walk.context.close()
    assert walk.problems == []
    assert heavy == []


#: Who reads: whether Northwind is theirs, and what isn't open to them.
READERS = {
    "nora": (True, RESERVED),
    "milo": (True, {*RESERVED, "/console/audit/"}),
    "nobody": (False, RESERVED),
}


def follow_links(walk: Walk, name: str) -> Iterator[str]:
    """Each page that opens for this reader, which names nothing of others."""
    sees_tenant, refused = READERS[name]
    for path in IN_NAVIGATION:
        assert walk.open(path) == (403 if path in refused else 200), path
        expect(walk.page.get_by_role("heading", level=1).first).to_be_attached()
        text = walk.page.content()
        forbidden_names = (
            "rival-private",
            "acme-private",
            *(() if sees_tenant else ("Northwind",)),
        )
        assert [name for name in forbidden_names if name in text] == [], path
        if path not in refused:
            yield path
    assert walk.open("/console/tenants/northwind/") == (200 if sees_tenant else 404)
    assert walk.open("/console/tenants/acme/") == 404


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [pytest.param("nora", marks=pytest.mark.slow), "nobody"])
def test_owners_and_outsiders_have_their_pages_and_no_others(
    browser: Browser, product: LiveServer, sessions: dict[str, Any], secret: str, name: str
) -> None:
    walk = Walk(browser, product.url, sessions[name], viewport=PHONE, color_scheme="dark")
    assert len(list(follow_links(walk, name))) > len(IN_NAVIGATION) / 2
    walk.context.close()
    assert walk.problems == []


def test_a_list_of_requests_says_when_newer_ones_have_come(
    browser: Browser, product: LiveServer, sessions: dict[str, Any], secret: str
) -> None:
    walk = Walk(browser, product.url, sessions["milo"], viewport=DESKTOP)
    walk.open("/console/requests/")
    rows = walk.page.locator(".requests tbody tr")
    count = rows.count()
    expect(walk.page.locator("#newer")).to_be_hidden()
    httpx.post(
        f"{product.url}/v1/completions",
        headers={"Authorization": f"Bearer {secret}"},
        json={"model": "quill", "prompt": "One more", "max_tokens": 2},
        timeout=60,
    ).raise_for_status()
    walk.page.get_by_role("link", name="Show the new requests").click()
    expect(rows).to_have_count(count + 1)
    walk.context.close()


def test_why_a_request_was_slow_takes_one_click_and_a_bill_two(
    browser: Browser, product: LiveServer, sessions: dict[str, Any], secret: str
) -> None:
    walk = Walk(browser, product.url, sessions["nora"], viewport=DESKTOP)
    page = walk.page
    slowest = page.get_by_role("table", name="Slowest").get_by_role("link").first
    walk.open("/console/")
    while slowest.count() == 0:  # records are written a second after their requests
        page.wait_for_timeout(500)
        walk.open("/console/")
    slowest.click()
    expect(page.get_by_role("heading", name="What happened")).to_be_visible()
    expect(page.locator("figure.story")).to_be_visible()
    page.get_by_role("navigation", name="Main").get_by_text("Usage and cost").click()
    expect(page.get_by_role("heading", name="Cost per day")).to_be_visible()
    page.get_by_role("table").get_by_role("link", name="quill").click()
    expect(page.get_by_role("link", name="Model: quill")).to_be_visible()
    page.get_by_role("navigation", name="Main").get_by_text("Requests", exact=True).click()
    page.get_by_role("columnheader", name="Duration").get_by_role("link").click()
    expect(page.get_by_role("columnheader", name="Duration")).to_have_attribute(
        "aria-sort", "descending"
    )
    walk.context.close()
    assert walk.problems == []


def test_members_have_their_pages_and_without_scripts_none_waits_for_them(
    browser: Browser, product: LiveServer, sessions: dict[str, Any], secret: str
) -> None:
    walk = Walk(browser, product.url, sessions["milo"], viewport=PHONE, java_script_enabled=False)
    for path in follow_links(walk, "milo"):
        main = walk.page.locator("main").first.inner_text()
        assert len(main.split()) > 8, path
        assert [word for word in ("Looking", "Loading", "Connecting") if word in main] == [], path
    walk.context.close()


def test_whoever_is_not_logged_in_finds_accessible_ways_in(
    browser: Browser, product: LiveServer
) -> None:
    walk, axe = Walk(browser, product.url, None, viewport=DESKTOP), Axe().axe_script
    for path in ("/login/", "/no/such/page"):
        walk.open(path)
        check_view(walk, axe, VIEWS)
    walk.context.close()
    assert walk.problems == []
