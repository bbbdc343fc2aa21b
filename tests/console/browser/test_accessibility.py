"""What axe-core finds where something happens: nothing. `test_every_page` has the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.console.browser.conftest import DESKTOP, PHONE, Open, expect_no_overflow
from tests.console.browser.playground import PlaygroundPage

#: Each of both at least once; all four would only take longer.
DESK: dict[str, Any] = {"viewport": DESKTOP, "color_scheme": "light"}
HAND: dict[str, Any] = {"viewport": PHONE, "color_scheme": "dark"}
#: What is sized or coloured anew has its new size and colour.
SETTLED = """new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)))
    .then(() => document.getAnimations().forEach((each) => each.finish()))"""
MARKDOWN = (
    "# Title\n\n- a list with `code`\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nx = 1\n```"
)


def problems(page: Page) -> list[str]:
    """Each rule that is broken, with the first element that breaks it."""
    violations = Axe().run(page).response["violations"]
    return [f"{violation['id']}: {violation['nodes'][0]['html'][:200]}" for violation in violations]


def turn(page: Page, view: dict[str, Any]) -> None:
    """Look at the same page in another way."""
    page.set_viewport_size(view["viewport"])
    page.emulate_media(color_scheme=view["color_scheme"])
    page.evaluate(SETTLED)


def in_both(page: Page) -> Iterator[None]:
    """At a desk, then on a phone."""
    for view in (DESK, HAND):
        turn(page, view)
        yield


def test_the_playground_with_an_answer_an_error_and_its_settings(open_page: Open) -> None:
    page = open_page(**HAND)
    playground = PlaygroundPage(page).ready()
    playground.finished(playground.play(text=MARKDOWN, reasoning="Let me think."))
    error = {"message": "Too long.", "type": "invalid_request_error", "param": None, "code": None}
    playground.finished(playground.play(text="Half", error=error))
    assert problems(page) == []
    for view in (HAND, DESK):
        turn(page, view)
        page.get_by_role("button", name="Settings", exact=True).click()
        expect(page.locator("#settings")).to_be_visible()
        assert problems(page) == []
        page.get_by_role("button", name="Close the settings").click()


def test_a_key_is_made_with_the_keyboard_alone(open_page: Open) -> None:
    page = open_page("/console/keys/")
    page.get_by_label("Name", exact=True).focus()
    page.keyboard.type("by keyboard")
    page.keyboard.press("Enter")
    secret = page.get_by_label("The key", exact=True)
    expect(secret).to_have_value(re.compile(r"^sk-quire-\w{53}$"))
    secret.focus()
    assert page.evaluate("getSelection().toString().length || document.activeElement.selectionEnd")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Copy the key")).to_be_focused()


def test_a_long_tenant_does_not_widen_the_page_of_keys_on_a_phone(open_page: Open) -> None:
    page = open_page("/console/keys/", "root", viewport=PHONE)
    page.get_by_role("button", name="Menu").click()
    choice = page.get_by_role("combobox", name="Tenant", exact=True)
    choice.evaluate("select => (select.options[select.selectedIndex].text = 'name '.repeat(30))")
    expect(choice).to_be_visible()
    expect_no_overflow(page)


def test_the_menu_leads_to_the_keys_on_a_phone(open_page: Open) -> None:
    page = open_page("/", viewport=PHONE)
    page.get_by_role("button", name="Menu").click()
    ways = page.get_by_role("navigation", name="Main")
    expect(ways).to_be_visible()
    assert problems(page) == []
    ways.get_by_role("link", name="API keys").click()
    expect(page.get_by_role("heading", level=1, name="API keys")).to_be_visible()
    expect(page.get_by_role("navigation", name="Main")).to_be_hidden()
    expect_no_overflow(page)


def test_escape_closes_the_menu_and_gives_the_focus_back(open_page: Open) -> None:
    page = open_page("/console/keys/", viewport=PHONE)
    page.get_by_role("button", name="Menu").click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("navigation", name="Main")).to_be_hidden()
    expect(page.get_by_role("button", name="Menu")).to_be_focused()
