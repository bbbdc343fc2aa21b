"""The pages of models, settings, batches and files, and the admin's forms, in a browser."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, Route, expect

from tests.console.browser.conftest import Open, expect_no_overflow
from tests.console.browser.test_accessibility import in_both, problems


def check_page(page: Page) -> None:
    """Nothing sticks out, axe finds nothing, at a desk and on a phone."""
    for _ in in_both(page):
        expect_no_overflow(page)
        assert problems(page) == []


VISIBLE_SETTINGS = (
    "[...document.querySelectorAll('.setting')].filter(each => each.checkVisibility())"
)
LINES_OF_FLAGS = (
    f"{VISIBLE_SETTINGS}.map(each => each.querySelector('code').getClientRects().length)"
)
GAPS = f"""{VISIBLE_SETTINGS}.map(each => Math.round(
    each.querySelector('input, select').getBoundingClientRect().top
    - each.querySelector('label, legend').getBoundingClientRect().bottom))"""


def test_a_model_and_its_form(open_page: Open) -> None:
    page = open_page("/console/models/", "root")
    page.get_by_role("rowheader").get_by_role("link", name="acme-private").click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    page.locator(".log-of summary").first.click()
    expect(page.locator("pre.log")).to_contain_text("The log is empty.")
    check_page(page)
    page.get_by_role("link", name="Settings", exact=True).last.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Settings of acme-private")
    search = page.get_by_label("Search the settings")
    search.fill("generation config")
    expect(page.locator(".setting:visible")).to_have_count(2)
    # As far beneath its name whether one value is typed or several, and flags in one piece.
    for _ in in_both(page):
        assert len(set(page.evaluate(GAPS))) == 1
        assert set(page.evaluate(LINES_OF_FLAGS)) == {1}
    search.fill("speculative")  # in a name, and in what another one says of itself
    expect(page.locator(".setting:visible")).to_have_count(2)
    pair = page.get_by_label("speculative config: name")
    pair.first.fill("method")
    page.get_by_label("speculative config: value").first.fill("nonsense")
    expect(pair).to_have_count(2)
    search.fill("")
    page.get_by_label("Folder, GGUF file").fill("some/where")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".field-error")).to_contain_text("method must be one of ngram, suffix")
    check_page(page)


def test_a_log_that_was_opened_before_the_script_came_is_shown(open_page: Open) -> None:
    page = open_page("/console/models/", "root")
    pending: list[Route] = []
    page.route("**/models/detail*.js", lambda route: pending.append(route))
    page.get_by_role("rowheader").get_by_role("link", name="acme-private").click(no_wait_after=True)
    page.locator(".log-of summary").first.click()
    for route in pending:
        route.continue_()
    assert pending
    expect(page.locator("pre.log").first).to_contain_text("The log is empty.")


#: Fields that stick out of their card.
OUT = """() => [...document.querySelectorAll(".form-row :is(input, select, textarea)")]
  .filter((field) => field.offsetParent !== null)
  .filter((field) => {
    const card = field.closest(".module").getBoundingClientRect();
    const box = field.getBoundingClientRect();
    return box.right > card.right || box.left < card.left;
  })
  .map((field) => field.name)"""


@pytest.mark.parametrize("path", ["tenants/tenant", "catalog/servedmodel"])
def test_the_admins_fields_stay_in_their_card(open_page: Open, path: str) -> None:
    page = open_page(f"/admin/{path}/1/change/", "root")
    for _ in in_both(page):
        assert page.evaluate(OUT) == []
        expect_no_overflow(page)
