"""The playground of somebody who belongs to several tenants."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Route, expect

from tests.console.browser.conftest import Open, expect_no_overflow
from tests.console.browser.playground import PlaygroundPage
from tests.console.browser.tabs import NOTHING

LONG = "A research group with an unusually long name, and then some more of it"
TENANTS = [{"id": "acme", "name": "Acme"}, {"id": "long", "name": LONG}]


def card(name: str) -> dict[str, Any]:
    return {"id": name, "state": "ready", "load_progress": 1, "replicas": 1, "max_model_len": 2048}


def answer(route: Route) -> None:
    tenant = "long" if "tenant=long" in route.request.url else "acme"
    models = [card(f"model-of-{tenant}")]
    route.fulfill(json={"models": models, "tenant": tenant, "tenants": TENANTS})


def several(open_page: Open, **options: Any) -> PlaygroundPage:
    page = open_page(NOTHING, **options)
    page.route("**/console/api/models*", answer)
    page.goto(page.url.replace(NOTHING, "/"))
    return PlaygroundPage(page).ready()


def test_questions_go_to_the_chosen_tenant_and_the_choice_is_kept(open_page: Open) -> None:
    playground = several(open_page)
    page = playground.page
    choice = page.get_by_role("combobox", name="Tenant")
    expect(choice).to_have_value("acme")
    assert playground.requested()["tenant"] == "acme"
    choice.select_option(LONG)
    expect(page.get_by_role("combobox", name="Model")).to_contain_text("model-of-long")
    asked = playground.requested()
    assert (asked["tenant"], asked["model"]) == ("long", "model-of-long")
    page.reload()
    playground.ready()
    expect(choice).to_have_value("long")


def test_the_folder_of_one_tenant_is_not_asked_of_another(open_page: Open) -> None:
    asked: list[str] = []

    def list_conversations(route: Route) -> None:
        asked.append(route.request.url)
        folders = ["Rivers"] if "tenant=acme" in route.request.url else []
        route.fulfill(json={"conversations": [], "more": False, "kept": True, "folders": folders})

    page = open_page(NOTHING, viewport={"width": 1680, "height": 900})
    page.route("**/console/api/conversations*", list_conversations)
    page.route("**/console/api/models*", answer)
    page.goto(page.url.replace(NOTHING, "/"))
    PlaygroundPage(page).ready()
    folder = page.locator("#folder")
    folder.select_option("Rivers")
    page.get_by_role("combobox", name="Tenant").select_option(LONG)
    expect(folder).to_be_hidden()
    assert [url for url in asked if "tenant=long" in url and "folder=" in url] == []
    assert any("tenant=long" in url for url in asked)


def test_a_long_name_leaves_room_for_the_rest_on_a_phone(open_page: Open) -> None:
    playground = several(open_page, viewport={"width": 390, "height": 844})
    page = playground.page
    page.get_by_role("combobox", name="Tenant").select_option(LONG)
    expect(page.get_by_role("combobox", name="Model")).to_contain_text("model-of-long")
    expect_no_overflow(page)
    for name in ("Settings", "New conversation"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 390


def test_a_single_tenant_is_named_and_not_asked_for(playground: PlaygroundPage) -> None:
    page = playground.page
    expect(page.get_by_role("combobox", name="Tenant")).to_be_hidden()
    expect(page.get_by_text("Usage counts towards acme")).to_be_visible()
