"""The model picker."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.console.browser.conftest import Open
from tests.console.browser.playground import PlaygroundPage
from tests.console.browser.tabs import NOTHING


def test_models_are_listed_with_their_states(playground: PlaygroundPage) -> None:
    page = playground.page
    picker = page.get_by_role("combobox", name="Model")
    expect(picker).to_contain_text("quill")
    expect(picker).to_contain_text("ready")
    picker.click()
    options = page.get_by_role("listbox", name="Models").get_by_role("option")
    expect(options).to_have_count(2)
    expect(options.nth(0)).to_contain_text("acme-private")
    expect(options.nth(0)).to_contain_text("loading, 40 %")
    expect(options.nth(1)).to_have_attribute("aria-selected", "true")


def test_the_chosen_model_is_asked_and_kept(playground: PlaygroundPage) -> None:
    page = playground.page
    page.get_by_role("combobox", name="Model").click()
    page.get_by_role("option", name="acme-private").click()
    expect(page.get_by_role("listbox")).to_be_hidden()
    assert playground.requested()["model"] == "acme-private"
    page.reload()
    playground.ready()
    expect(page.get_by_role("combobox", name="Model")).to_contain_text("acme-private")


def test_failures_and_absences_have_words(open_page: Open) -> None:
    states = ["failed", "offline", "stalled", "draining"]
    models = [
        {"id": f"m-{s}", "state": s, "load_progress": 0, "replicas": 0, "max_model_len": None}
        for s in states
    ]
    page = open_page(answers={"/console/api/models": {"models": models, "tenant": "acme"}})
    PlaygroundPage(page).ready()
    page.get_by_role("combobox", name="Model").click()
    words = ["failed", "no replica", "not responding", "draining"]
    for option, word in zip(
        page.get_by_role("listbox", name="Models").get_by_role("option").all(), words, strict=True
    ):
        expect(option).to_contain_text(word)


def test_without_a_model_nothing_can_be_sent_and_the_page_says_why(open_page: Open) -> None:
    page = open_page(answers={"/console/api/models": {"models": [], "tenant": None}})
    playground = PlaygroundPage(page).ready()
    expect(page.get_by_text("No model that you may use is loaded yet")).to_be_visible()
    playground.prompt.fill("Hello")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_disabled()


def test_a_failing_list_is_told_and_asked_for_again(open_page: Open) -> None:
    page = open_page(NOTHING)
    error = {"message": "Redis is away.", "type": "server_error", "param": None, "code": "x"}
    failing = {"json": {"error": error}, "status": 503}
    page.route("**/console/api/models", lambda route: route.fulfill(**failing), times=1)
    page.goto(page.url.replace(NOTHING, "/"))
    expect(page.locator("#toast")).to_contain_text("Redis is away.")
    PlaygroundPage(page).ready()


def test_viewers_see_why_they_cannot_send_and_nothing_that_sends(open_page: Open) -> None:
    model = {"id": "quill", "state": "ready", "load_progress": 0, "max_model_len": 4096}
    answer = {"models": [model], "tenant": "acme", "view_only": True}
    page = open_page(answers={"/console/api/models": answer})
    expect(page.get_by_text("Viewers can't send messages.")).to_be_visible()
    expect(page.get_by_label("Message", exact=True)).to_be_hidden()
    expect(page.locator(".starter").first).to_be_hidden()
