"""Everything with the keyboard alone."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.console.browser.conftest import Open
from tests.console.browser.playground import PlaygroundPage
from tests.console.seed import PASSWORD


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def test_from_login_to_answer(open_page: Open) -> None:
    page = open_page("/", None)
    expect(page.get_by_label("Username")).to_be_focused()
    page.keyboard.type("ada")
    press(page, "Tab")
    page.keyboard.type(PASSWORD)
    press(page, "Enter")
    playground = PlaygroundPage(page).ready()
    expect(playground.prompt).to_be_focused()
    page.keyboard.type("Hello")
    press(page, "Shift+Enter")
    page.keyboard.type("there")
    press(page, "Enter")
    playground.finished(playground.answers.first)
    expect(playground.questions.first.locator(".question-text")).to_have_text("Hello\nthere")


def test_the_model_is_picked_with_arrows(playground: PlaygroundPage) -> None:
    page = playground.page
    picker = page.get_by_role("combobox", name="Model")
    picker.focus()
    press(page, "ArrowDown")
    expect(page.get_by_role("listbox")).to_be_visible()
    expect(picker).to_have_attribute("aria-activedescendant", "model-list-1")
    press(page, "ArrowUp", "Enter")
    expect(picker).to_contain_text("acme-private")
    expect(picker).to_have_attribute("aria-expanded", "false")
    press(page, "q", "Enter")
    expect(picker).to_contain_text("quill")
    press(page, "Enter", "Escape")
    expect(page.get_by_role("listbox")).to_be_hidden()


def test_an_empty_field_and_arrow_up_edit_the_last_question(playground: PlaygroundPage) -> None:
    playground.answer_to("Old")
    page = playground.page
    press(page, "ArrowUp")
    page.keyboard.type("er")
    press(page, "Enter")
    expect(playground.answers.first.locator(".prose")).to_have_text("You said: Older")
    expect(playground.prompt).to_be_focused()


def test_the_first_tab_stop_skips_to_the_content(open_page: Open) -> None:
    page = open_page("/console/")
    press(page, "Tab")
    skip = page.get_by_role("link", name="Skip to the content")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()


def test_every_stop_on_the_way_shows_the_focus_and_has_a_name(open_page: Open) -> None:
    page = open_page(reduced_motion="reduce")  # what fades in is there at once
    PlaygroundPage(page).ready().answer_to("Hello")
    page.locator(".skip-link").focus()
    seen = []
    for _ in range(40):
        press(page, "Tab")
        focused = page.evaluate(
            """async () => {
              await new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)));
              const e = document.activeElement, s = getComputedStyle(e);
              if (e === document.body) return null;
              const label = e.labels?.[0]?.textContent;
              return { name: e.getAttribute("aria-label") || label || e.textContent.trim(),
                       outline: s.outlineStyle !== "none" && parseFloat(s.outlineWidth) > 0,
                       visible: e.checkVisibility({ opacityProperty: true }),
                       tag: e.id || e.className || e.localName };
            }"""
        )
        if focused is None:
            break
        seen.append(focused)
    assert len(seen) > 20
    assert [focus for focus in seen if not (focus["name"] and focus["outline"])] == []
    assert [focus for focus in seen if not focus["visible"]] == []


def test_enter_that_chooses_a_word_of_an_input_method_does_not_send(
    playground: PlaygroundPage,
) -> None:
    playground.prompt.fill("にほん")
    playground.prompt.dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    expect(playground.answers).to_have_count(0)
    expect(playground.prompt).to_have_value("にほん")


def test_the_end_of_an_answer_is_announced(playground: PlaygroundPage) -> None:
    playground.answer_to("Hello")
    expect(playground.page.locator("#announcer")).to_have_text("Answer complete.")
