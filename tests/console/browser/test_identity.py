"""Sign-in, second factors, invitations and offboarding, as people meet them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from allauth.mfa.totp.internal.auth import format_hotp_value, hotp_value
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.console.browser.conftest import DESKTOP, PHONE, log_in
from tests.console.live import LiveServer
from tests.console.oidc_provider import Provider
from tests.console.seed import PASSWORD


@pytest.fixture
def url(site: LiveServer) -> str:
    return site.url.replace("127.0.0.1", "localhost")


@pytest.fixture
def tab(browser: Browser) -> Iterator[Page]:
    """A fresh browser on a phone; a script's error or a refused policy fails the test."""
    context = browser.new_context(viewport=PHONE)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda console_message: (
            "Policy" in console_message.text and problems.append(console_message.text)
        ),
    )
    yield page
    context.close()
    assert problems == []


def be(context: BrowserContext, name: str, sessions: dict[str, Any]) -> None:
    """Somebody who has logged in, though not in this browser."""
    for cookie in sessions[name]["cookies"]:
        context.add_cookies([{**cookie, "domain": "localhost"}])


def code_of(secret: str) -> str:
    return str(format_hotp_value(hotp_value(secret, int(time.time()) // 30)))


def test_a_person_signs_on_with_the_identity_provider(
    tab: Page, site: LiveServer, url: str, provider: Provider
) -> None:
    provider.person = {"sub": "9", "preferred_username": "zoe", "groups": ["devs"]}
    tab.goto(f"{url}/login/?next=/console/members/")
    tab.get_by_role("link", name="Log in with Acme ID").click()
    tab.wait_for_url(f"{url}/console/members/")
    expect(tab.get_by_role("row", name=re.compile("zoe"))).to_contain_text("Member")


def test_whoever_the_provider_names_no_group_of_is_told_so(
    tab: Page, url: str, provider: Provider
) -> None:
    provider.person = {"sub": "10", "preferred_username": "eve", "groups": []}
    tab.goto(f"{url}/login/")
    tab.get_by_role("link", name="Log in with Acme ID").click()
    expect(tab.get_by_role("heading", name="You have no access yet")).to_be_visible()


def test_an_authenticator_app_is_set_up_and_asked_for(
    tab: Page, browser: Browser, url: str
) -> None:
    log_in(tab, url, "tom")
    tab.goto(f"{url}/account/2fa/")
    tab.get_by_role("link", name="Activate").click()
    tab.get_by_label("Password").fill(PASSWORD)
    tab.get_by_role("button", name="Confirm").click()
    secret = tab.get_by_label("Authenticator secret").input_value()
    expect(tab.locator("img.qr")).to_have_js_property("complete", True)
    assert tab.locator("img.qr").evaluate("image => image.naturalWidth") > 0
    tab.get_by_label("Authenticator code").fill(code_of(secret))
    tab.get_by_role("button", name="Activate").click()
    codes = tab.get_by_label("Unused codes").input_value().split()
    assert len(codes) == 10
    other = browser.new_context()
    page = other.new_page()
    page.goto(f"{url}/login/")
    page.get_by_label("Username or email address").fill("tom")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="Two-Factor Authentication")).to_be_visible()
    page.get_by_label("Code").fill(codes[0])
    page.get_by_role("button", name="Sign In").click()
    page.wait_for_url(f"{url}/")
    other.close()


def with_security_key(context: BrowserContext, page: Page) -> None:
    """A security key in the browser's own devices, which always says yes."""
    session = context.new_cdp_session(page)
    session.send("WebAuthn.enable")
    options = {"protocol": "ctap2", "transport": "usb", "hasUserVerification": True}
    options |= {"isUserVerified": True, "automaticPresenceSimulation": True}
    session.send("WebAuthn.addVirtualAuthenticator", {"options": options})


def test_a_security_key_is_added_and_asked_for(tab: Page, url: str) -> None:
    with_security_key(tab.context, tab)
    log_in(tab, url, "kim")
    tab.goto(f"{url}/account/2fa/webauthn/add/")
    tab.get_by_label("Password").fill(PASSWORD)
    tab.get_by_role("button", name="Confirm").click()
    tab.get_by_label("Name").fill("blue key")
    tab.wait_for_load_state()  # the button is a script's
    tab.get_by_role("button", name="Add").click()
    expect(tab.get_by_label("Unused codes")).to_be_visible()
    tab.context.clear_cookies()
    tab.goto(f"{url}/login/")
    tab.get_by_label("Username or email address").fill("kim")
    tab.get_by_label("Password").fill(PASSWORD)
    tab.get_by_role("button", name="Log in").click()
    tab.get_by_role("button", name="Use a security key").click()
    tab.wait_for_url(f"{url}/")


def test_somebody_joins_by_an_invitation(
    tab: Page, browser: Browser, url: str, sessions: dict[str, Any]
) -> None:
    admin = browser.new_context(viewport=DESKTOP)
    page = admin.new_page()
    be(admin, "ada", sessions)
    page.goto(f"{url}/console/members/")
    page.get_by_label("Mail address").fill("ines@example.org")
    page.get_by_role("button", name="Invite").click()
    link = page.locator("#link").input_value()
    page.reload()
    expect(page.locator("#link")).to_have_count(0)
    tab.goto(link)
    expect(tab.get_by_role("heading", name="Join Acme")).to_be_visible()
    tab.get_by_label("Username").fill("ines")
    tab.get_by_label("Password").fill(PASSWORD)
    tab.get_by_role("button", name="Create an account and join").click()
    tab.wait_for_url(f"{url}/")
    page.reload()
    expect(page.get_by_role("row", name=re.compile("ines"))).to_contain_text("ines@example.org")
    tab.goto(link)
    expect(tab.get_by_role("heading", name="No such invitation")).to_be_visible()
    admin.close()


def test_fault_43_who_is_removed_is_out_of_an_open_page_within_seconds(
    tab: Page, browser: Browser, url: str, sessions: dict[str, Any]
) -> None:
    be(tab.context, "noah", sessions)
    tab.goto(f"{url}/")
    expect(tab.locator("#connection")).to_have_attribute("data-state", "open")
    admin = browser.new_context(viewport=DESKTOP)
    page = admin.new_page()
    be(admin, "ada", sessions)
    page.goto(f"{url}/console/members/")
    row = page.get_by_role("row", name=re.compile("noah"))
    row.get_by_text("Remove", exact=False).first.click()
    row.get_by_role("button", name="Remove the member").click()
    expect(page.get_by_role("status").first).to_contain_text("noah is no longer a member")
    expect(tab.locator("#connection")).to_contain_text("Your session has ended")
    tab.goto(f"{url}/console/")
    tab.wait_for_url(re.compile("/login/"))
    admin.close()
