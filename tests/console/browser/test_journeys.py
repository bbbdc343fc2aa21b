"""What people come for, counted in clicks."""

from __future__ import annotations

import re

from playwright.sync_api import Locator, Page, expect

from tests.console.browser.conftest import Open
from tests.console.browser.playground import PlaygroundPage


class Journey:
    """A reader's clicks on a page."""

    def __init__(self, page: Page) -> None:
        self.page, self.clicks = page, 0

    def click(self, target: Locator) -> None:
        """Click once more."""
        target.click()
        self.clicks += 1

    def follow(self, name: str) -> None:
        """Click an entry of the navigation."""
        self.click(self.page.get_by_role("navigation", name="Main").get_by_text(name, exact=True))


def test_the_first_chat_takes_a_click(playground: PlaygroundPage) -> None:
    playground.prompt.fill("Hello")  # the page opens with the cursor there and a model chosen
    journey = Journey(playground.page)
    journey.click(playground.page.get_by_role("button", name="Send"))
    playground.finished(playground.answers.first)
    assert journey.clicks <= 3


def test_the_first_key_takes_two_clicks(open_page: Open) -> None:
    journey = Journey(open_page("/console/"))
    journey.follow("API keys")
    journey.click(journey.page.get_by_role("button", name="Create the key"))
    expect(journey.page.get_by_role("textbox", name="The key")).to_have_value(re.compile("."))
    assert journey.clicks <= 3


def test_a_model_a_person_and_a_page_are_found_by_the_keyboard_alone(open_page: Open) -> None:
    page = open_page("/console/?tenant=acme")
    for text, title, address in (
        ("acme-priv", "acme-private", r"/console/models/\d+/$"),
        ("lea", "lea", r"/console/members/\?tenant=acme$"),
        ("Audit", "Audit log", r"/console/audit/$"),
    ):
        page.wait_for_load_state()
        page.keyboard.press("Control+k")
        search = page.get_by_role("combobox", name="Search")
        expect(search).to_be_focused()
        search.fill(text)
        option = page.get_by_role("listbox", name="Results").get_by_role("option").first
        expect(option).to_contain_text(title)
        expect(option).to_have_attribute("aria-selected", "true")
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile(address))


def test_the_tenant_is_switched_for_all_pages(open_page: Open) -> None:
    page = open_page("/console/members/", "root")
    page.get_by_role("combobox", name="Tenant").select_option("rival")
    expect(page).to_have_url(re.compile(r"/console/members/\?tenant=rival"))
    expect(page.get_by_role("table").get_by_text("olga").first).to_be_visible()
    Journey(page).follow("API keys")
    expect(page.get_by_role("combobox", name="Tenant")).to_have_value("rival")
    page.get_by_role("combobox", name="Tenant").select_option("acme")
    expect(page).to_have_url(re.compile(r"tenant=acme"))
    expect(page.get_by_role("heading", level=1, name="API keys")).to_be_visible()
