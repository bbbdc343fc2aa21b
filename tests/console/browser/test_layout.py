"""The look: widths, themes, motion."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.console.browser.conftest import PHONE, Open, expect_no_overflow
from tests.console.browser.playground import PlaygroundPage
from tests.console.browser.test_accessibility import SETTLED

WIDE_TEXT = (
    "A very long word: " + "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n\n"
    "| a | b |\n|---|---|\n| "
    + "z" * 200
    + " | w |\n\n[link](https://example.org/"
    + "q" * 200
    + ")"
)

#: No part of a model's name is cut off.
NAMES_ARE_FULL = """() => [...document.querySelectorAll(".picker-button .picker-name")]
    .every((name) => name.clientWidth > 0 && name.scrollWidth === name.clientWidth)"""


def background(page: Page) -> int:
    """The page's lightness, 0 to 255."""
    rgb = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return max(int(part) for part in rgb.removeprefix("rgb(").removesuffix(")").split(","))


WIDTHS = [320, 390, 768, 1280]
SCROLLER_FITS = """() => (({scrollWidth, clientWidth}) => scrollWidth <= clientWidth)(
    document.getElementById("scroller"))"""


def test_no_width_needs_sideways_scrolling(open_page: Open) -> None:
    page = open_page("/", "root", viewport=PHONE)
    PlaygroundPage(page).ready().finished_text(WIDE_TEXT)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        expect_no_overflow(page)
        page.wait_for_function(SCROLLER_FITS)


def test_long_model_names_are_cut_not_spilled(open_page: Open) -> None:
    model = {"id": "n" * 200, "state": "ready", "load_progress": 0, "max_model_len": 4096}
    answers = {"/console/api/models": {"models": [model], "tenant": "acme"}}
    page = open_page(viewport=PHONE, answers=answers)
    PlaygroundPage(page).ready()
    expect_no_overflow(page)
    new = page.get_by_role("button", name="New conversation")
    expect(new).to_be_in_viewport(ratio=1)


def test_both_names_are_whole_when_two_models_are_compared(open_page: Open) -> None:
    names = ["meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-0.5B-Instruct"]
    models = [{"id": name, "state": "ready", "max_model_len": 4096, "tasks": []} for name in names]
    answers = {"/console/api/models": {"models": models, "tenant": "acme"}}
    path = f"/?model={names[0]}&compare={names[1]}"
    page = open_page(path, answers=answers)
    PlaygroundPage(page).ready()
    for width in (1440, PHONE["width"]):
        page.set_viewport_size({"width": width, "height": 900})
        model_name = page.locator(".picker-button .picker-name")
        expect(model_name).to_have_text(names)
        page.wait_for_function(NAMES_ARE_FULL)
        expect_no_overflow(page)


def test_the_systems_theme_is_followed(open_page: Open) -> None:
    page = open_page("/login/", None, color_scheme="dark")
    assert background(page) < 128
    page.emulate_media(color_scheme="light")
    page.evaluate(SETTLED)
    assert background(page) > 128


def test_the_theme_can_be_chosen_and_is_kept_also_in_the_admin(open_page: Open) -> None:
    page = open_page("/", "root")
    assert background(page) > 128
    toggle = page.get_by_role("button", name="Theme")
    toggle.click()  # as the system -> light
    toggle.click()  # -> dark
    assert background(page) < 128
    expect(toggle).to_have_attribute("aria-label", "Theme: dark. Change")
    page.reload()
    assert background(page) < 128
    page.goto(page.url + "admin/")
    assert background(page) < 128
    toggle = page.get_by_role("button", name="Theme").or_(page.locator(".theme-toggle")).first
    expect(toggle).to_be_visible()


def test_on_a_phone_the_settings_lie_over_the_page(open_page: Open) -> None:
    page = open_page(viewport=PHONE, has_touch=True, is_mobile=True)
    PlaygroundPage(page).ready()
    panel = page.get_by_role("dialog", name="Settings")
    expect(panel).to_be_hidden()
    page.get_by_role("button", name="Settings").click()
    expect(panel).to_be_visible()
    assert page.evaluate("document.getElementById('settings').matches(':modal')")
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    expect(page.get_by_role("button", name="Settings")).to_be_focused()


def test_on_a_desktop_the_settings_stand_beside_it_and_stay_closed_once_closed(
    playground: PlaygroundPage,
) -> None:
    page = playground.page
    panel = page.locator("#settings")
    expect(panel).to_be_visible()
    assert not panel.evaluate("d => d.matches(':modal')")
    page.get_by_role("button", name="Close the settings").click()
    expect(panel).to_be_hidden()
    page.reload()
    playground.ready()
    expect(panel).to_be_hidden()


def test_readers_who_want_less_motion_get_none(open_page: Open) -> None:
    page = open_page(reduced_motion="reduce")
    playground = PlaygroundPage(page).ready()
    answer = playground.play(text="word " * 1000, cut=5, pause=0.05)
    expect(answer.locator("p").first).to_contain_text("word word")
    pen = "e => getComputedStyle(e, '::after').animationName"
    assert answer.locator("p").first.evaluate(pen) == "none"


def test_the_admin_runs_under_its_policy(open_page: Open) -> None:
    page = open_page("/admin/", "root")
    ways = page.get_by_role("navigation", name="Main")
    expect(ways.get_by_role("link", name="Raw data")).to_have_attribute("aria-current", "page")
    page.goto(page.url + "auth/group/add/")
    expect(page.locator(".selector-available")).to_be_visible()  # built by the admin's scripts


def test_times_are_the_readers_and_say_so(open_page: Open) -> None:
    page = open_page("/console/audit/", timezone_id="Asia/Kathmandu")
    expect(page.locator("tbody time").first).to_have_text(
        re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d GMT\+0?5:45")
    )
    baseline_page = open_page("/console/audit/", java_script_enabled=False)
    expect(baseline_page.locator("tbody time").first).to_have_text(
        re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC")
    )
