"""The whole product below a path of a host whose other paths are somebody else's."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from allauth.mfa.totp.internal.auth import format_hotp_value, hotp_value
from playwright.sync_api import Browser, Error, Page, expect

from tests.console.browser.conftest import DESKTOP
from tests.console.browser.playground import PlaygroundPage
from tests.console.browser.test_every_page import BELOW, IN_NAVIGATION, RESERVED
from tests.console.seed import PASSWORD
from tests.e2e.mail_server import MailServer, receiving
from tests.e2e.product import Product, running

ROOT = "/quire"
#: Where a page leads to: links, forms, and what scripts are told.
ADDRESSES = """() => [...document.querySelectorAll("*")].flatMap((each) =>
    ["href", "src", "action", "formaction", "data-url", "data-api", "data-again", "data-socket",
     "data-socket-path", "data-address"].map((name) => each.getAttribute(name)).filter(Boolean))"""


@dataclass
class Proxy:
    """Passes on what lies below `ROOT`, with or without it, and answers 404 to all else."""

    upstream: int
    strips: bool
    port: int = 0
    outside: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where Quire is for its users."""
        return f"http://localhost:{self.port}{ROOT}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, or one WebSocket, of a connection."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
            method, path, rest = head.split(" ", 2)
            if not path.startswith(f"{ROOT}/"):
                self.outside.append(path)
                writer.write(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n")
                return
            if "upgrade: websocket" not in head.lower():
                rest = re.sub(r"(?im)^connection: .*\r\n", "", rest)
                rest = rest.replace("\r\n", "\r\nConnection: close\r\n", 1)
            passed = path.removeprefix(ROOT) if self.strips else path
            theirs, ours = await asyncio.open_connection("127.0.0.1", self.upstream)
            ours.write(f"{method} {passed} {rest}".encode("latin1"))
            sending = asyncio.create_task(pump(reader, ours))
            await pump(theirs, writer)
            sending.cancel()
            ours.close()
        except (OSError, asyncio.IncompleteReadError):
            pass  # a browser opens connections that it doesn't use, and closes others early
        finally:
            writer.close()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(65536):
        writer.write(part)
        await writer.drain()


@contextmanager
def proxied(upstream: int, *, strips: bool) -> Iterator[Proxy]:
    """A proxy before that port."""
    proxy, loop = Proxy(upstream, strips), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    starting = asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    server = asyncio.run_coroutine_threadsafe(starting, loop).result(60)
    proxy.port = server.sockets[0].getsockname()[1]
    yield proxy

    async def close() -> None:
        server.close()
        open_connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in open_connections:
            task.cancel()
        await asyncio.gather(*open_connections, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(close(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)


@dataclass
class Below:
    """The product, its two proxies and its mail."""

    product: Product
    stripping: Proxy
    forwarding: Proxy
    mail: MailServer


@pytest.fixture(scope="module")
def below(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Below]:
    """`manage.py up --root-path`, whose admins need a second factor."""
    with receiving() as mail:
        environment = {
            "QUIRE_SMTP_URL": f"smtp://127.0.0.1:{mail.port}",
            "QUIRE_MAIL_FROM": "quire@mail.example",
            "QUIRE_MFA_ROLES": "admin",
        }
        folder = tmp_path_factory.mktemp("below")
        with running(folder, "--root-path", ROOT, **environment) as product:
            port = urlsplit(product.url).port or 0
            with proxied(port, strips=True) as stripping, proxied(port, strips=False) as baseline:
                yield Below(product, stripping, baseline, mail)


class Visit:
    """A person's tab, and what went wrong in it."""

    def __init__(self, browser: Browser, proxy: Proxy) -> None:
        self.context = browser.new_context(viewport=DESKTOP)
        self.context.set_default_timeout(60_000)
        self.page, self.url = self.context.new_page(), proxy.url
        self.problems: list[str] = []
        self.sockets: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("response", self._answered)
        self.page.on("websocket", lambda socket: self.sockets.append(urlsplit(socket.url).path))

    def _answered(self, response: Any) -> None:
        address = urlsplit(response.url)
        if address.scheme == "http" and not (
            address.path.startswith(f"{ROOT}/") and response.status != 404
        ):
            self.problems.append(f"{response.status} {response.url}")

    def open(self, path: str) -> int:
        """Its status; and nothing on the page leads out."""
        response = self.page.goto(self.url + path)
        assert response is not None
        for address in self._addresses():
            if address.startswith("/") and not address.startswith(f"{ROOT}/"):
                self.problems.append(f"{path} leads to {address}")
        return response.status

    def _addresses(self) -> list[str]:
        try:
            addresses: list[str] = self.page.evaluate(ADDRESSES)
        except Error:  # the page loaded itself again, because what it lists had changed
            self.page.wait_for_load_state()
            addresses = self.page.evaluate(ADDRESSES)
        return addresses

    def close(self) -> None:
        """It all went well."""
        cookies = {
            cookie["name"]: cookie["path"] for cookie in self.context.cookies(f"{self.url}/")
        }
        assert set(cookies.values()) == {ROOT}, cookies
        self.context.close()
        assert self.problems == []


def log_in(page: Page, name: str, password: str) -> None:
    page.get_by_label("Username or email address").fill(name)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()


def join(visit: Visit, link: str, name: str) -> None:
    """As whom an invitation asks for."""
    visit.page.goto(link)
    visit.page.get_by_label("Username").fill(name)
    visit.page.get_by_label("Password").fill(PASSWORD)
    visit.page.get_by_role("button", name="Create an account and join").click()


def link_in(text: str, url: str) -> str:
    match = re.search(rf"{re.escape(url)}/\S+", text)
    assert match, text
    return match[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "strips",
    [
        pytest.param(True, id="stripped"),
        # The tests below ask for pages, scripts and the API by this way, too.
        pytest.param(False, id="passed-on", marks=pytest.mark.slow),
    ],
)
def test_fault_74_operators_walk_all_pages_below_a_path(
    browser: Browser, below: Below, strips: bool
) -> None:
    proxy = below.stripping if strips else below.forwarding
    visit = Visit(browser, proxy)
    page = visit.page
    visit.open("/console/audit/?x=1")
    page.wait_for_url(f"{visit.url}/login/?next={ROOT}/console/audit/%3Fx%3D1")
    log_in(page, below.product.admin_user, below.product.admin_password)
    page.wait_for_url(f"{visit.url}/console/audit/?x=1")
    # Pages come alike by both ways; all of them are asked for by one.
    for path in IN_NAVIGATION if strips else IN_NAVIGATION[::5]:
        assert visit.open(path) == 200, path
    for path in BELOW:
        if path.startswith("/account/") or path == "/admin/tenants/user/":
            assert visit.open(path) == 200, path
    visit.open("/")
    answer = PlaygroundPage(page).ready().answer_to("What is a glacier?")
    assert answer.inner_text().strip()
    visit.open("/console/")
    expect(page.locator("#pulse")).to_contain_text("Live")
    base = page.get_by_text(f"{visit.url}/v1").first
    expect(base).to_be_attached()
    visit.open("/console/kv/")
    expect(page.locator("#kv-state")).to_have_text("Live")
    assert set(visit.sockets) == {f"{ROOT}/ws/{name}/" for name in ("playground", "console", "kv")}
    visit.open("/account/sessions/")
    visit.close()
    assert proxy.outside == []


@pytest.mark.timeout(600)
def test_fault_74_members_join_walk_log_out_and_come_back_by_mails(
    browser: Browser, below: Below
) -> None:
    product, proxy = below.product, below.stripping
    product.manage("create_tenant", "northwind")
    process = product.manage(
        "invite", "mia@mail.example", "--tenant", "northwind", "--url", proxy.url
    )
    visit = Visit(browser, proxy)
    page = visit.page
    join(visit, link_in(process, proxy.url), "mia")
    page.wait_for_url(f"{visit.url}/")
    for path in IN_NAVIGATION[::5]:  # an operator has asked for all
        refused = path in RESERVED or path == "/console/audit/"
        assert visit.open(path) == (403 if refused else 200), path
    visit.open("/")
    page.evaluate("document.querySelector('form[action$=\"/logout/\"]').requestSubmit()")
    page.wait_for_url(f"{visit.url}/login/")
    page.get_by_role("link", name=re.compile("password", re.I)).click()
    page.get_by_label(re.compile("mail", re.I)).fill("mia@mail.example")
    page.locator("main form button[type=submit]").click()
    page.goto(link_in(below.mail.mail_to("mia@mail.example", "/password/reset/key/"), proxy.url))
    for field_ in page.locator("main input[type=password]").all():
        field_.fill(f"{PASSWORD} and more")
    page.get_by_role("button", name="Change Password").click()
    page.wait_for_url(f"{visit.url}/account/password/reset/key/done/")
    page.goto(f"{visit.url}/console/")
    log_in(page, "mia", f"{PASSWORD} and more")
    page.wait_for_url(f"{visit.url}/console/")
    visit.close()
    assert proxy.outside == []


@pytest.mark.timeout(600)
def test_fault_74_roles_that_need_a_second_factor_set_it_up_below_a_path(
    browser: Browser, below: Below
) -> None:
    product, proxy = below.product, below.forwarding
    product.manage("create_tenant", "contoso")
    invited = ("invite", "abe@mail.example", "--tenant", "contoso", "--role", "admin")
    process = product.manage(*invited, "--url", proxy.url)
    visit = Visit(browser, proxy)
    page = visit.page
    join(visit, link_in(process, proxy.url), "abe")
    page.wait_for_url(f"{visit.url}/account/2fa/?required=yes")
    refused = page.request.get(f"{visit.url}/api/tenants/")
    assert refused.status == 403
    assert f"{ROOT}/account/2fa/" in refused.json()["error"]["message"]
    page.get_by_role("link", name="Activate").click()
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Confirm").click()
    secret = page.get_by_label("Authenticator secret").input_value()
    code = format_hotp_value(hotp_value(secret, int(time.time()) // 30))
    page.get_by_label("Authenticator code").fill(str(code))
    page.get_by_role("button", name="Activate").click()
    expect(page.get_by_label("Unused codes")).to_be_visible()
    assert visit.open("/console/members/") == 200
    visit.close()
    assert proxy.outside == []


def test_fault_74_programs_find_the_api_below_a_path(below: Below) -> None:
    product = below.product
    assert urlsplit(product.url).path == urlsplit(product.admin_url).path[: len(ROOT)] == ROOT
    invited = product.manage("invite", "eve@mail.example", "--tenant", "default")
    assert invited.startswith(f"{product.url}/invitation/")
    for proxy in (below.stripping, below.forwarding):
        described = httpx.get(f"{proxy.url}/openapi.json").json()
        assert described["servers"] == [{"url": ROOT}]
        reference = httpx.get(f"{proxy.url}/reference/").text
        assert f"{proxy.url}/v1/chat/completions" in reference
        bare = httpx.get(f"http://127.0.0.1:{below.product.url.rpartition(':')[2]}")
        assert bare.headers["location"].endswith(f"{ROOT}/")
