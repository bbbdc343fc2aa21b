"""What axe-core finds where something happens: nothing. `test_every_page` has the rest."""

from __future__ import annotations

import re
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.console.browser.conftest import DESKTOP, PHONE, Open
from tests.console.browser.playground import PlaygroundPage

#: Each of both at least once; all four would only take longer.
VIEWS: list[Any] = [
    pytest.param({"viewport": DESKTOP, "color_scheme": "light"}, id="desk"),
    pytest.param({"viewport": PHONE, "color_scheme": "dark"}, id="phone"),
]
views = pytest.mark.parametrize("view", VIEWS)
MARKDOWN = (
    "# Title\n\n- a list with `code`\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nx = 1\n```"
)


def problems(page: Page) -> list[str]:
    """Each rule that is broken, with the first element that breaks it."""
    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found]


@views
def test_the_playground_with_an_answer_an_error_and_its_settings(
    open_page: Open, view: dict[str, Any]
) -> None:
    page = open_page(**view)
    playground = PlaygroundPage(page).ready()
    playground.finished(playground.play(text=MARKDOWN, reasoning="Let me think."))
    error = {"message": "Too long.", "type": "invalid_request_error", "param": None, "code": None}
    playground.finished(playground.play(text="Half", error=error))
    assert problems(page) == []
    if page.locator("#settings").is_hidden():
        page.get_by_role("button", name="Settings").click()
        expect(page.locator("#settings")).to_be_visible()
        assert problems(page) == []


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
    choice = page.get_by_role("combobox", name="Tenant", exact=True)
    choice.evaluate("select => (select.options[select.selectedIndex].text = 'name '.repeat(30))")
    expect(choice).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_menu_leads_to_the_keys_on_a_phone(open_page: Open) -> None:
    page = open_page("/", viewport=PHONE)
    page.get_by_role("button", name="Menu").click()
    ways = page.get_by_role("navigation", name="Main")
    expect(ways).to_be_visible()
    assert problems(page) == []
    ways.get_by_role("link", name="API keys").click()
    expect(page.get_by_role("heading", level=1, name="API keys")).to_be_visible()
    expect(page.get_by_role("navigation", name="Main")).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_escape_closes_the_menu_and_gives_the_focus_back(open_page: Open) -> None:
    page = open_page("/console/keys/", viewport=PHONE)
    page.get_by_role("button", name="Menu").click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("navigation", name="Main")).to_be_hidden()
    expect(page.get_by_role("button", name="Menu")).to_be_focused()
