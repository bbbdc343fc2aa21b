"""One navigation: whom it shows what, and the register of pages behind it."""

from __future__ import annotations

import re

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import resolve, reverse

import console.navigation
from console.navigation import NAVIGATION, Audience, NavPage, navigation, pages
from console.views.playground_tabs import TABS
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Role, Tenant, User
from tests.console.conftest import Login
from tests.console.seed import PASSWORD


def titles(html: str) -> list[str]:
    """The entries that a page shows."""
    inside = html.split('aria-label="Main"', 1)[1].split("</nav>", 1)[0]
    return re.findall(r"</svg>([^<]+)</a>", inside)


def test_every_page_that_is_built_is_found_under_its_address() -> None:
    for page in pages():
        if page.has_view:
            assert reverse(page.name) == f"/{page.address}"
            assert resolve(f"/{page.address}").view_name == page.name


def test_names_and_addresses_are_each_ones_own() -> None:
    navigation_pages = list(pages())
    assert len({page.name for page in navigation_pages}) == len(navigation_pages)
    assert len({page.address for page in navigation_pages}) == len(navigation_pages)


def test_a_page_that_is_not_built_has_no_entry(rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    unbuilt = NavPage("unbuilt", "console/unbuilt/", "Unbuilt", "list")
    monkeypatch.setattr(console.navigation, "NAVIGATION", {**NAVIGATION, "More": (unbuilt,)})
    root = User.objects.get(username="root")
    assert "More" not in [section["title"] for section in navigation(root, "/")]


def test_operators_and_staff_see_what_is_theirs_and_others_do_not(login: Login) -> None:
    ada = titles(login("ada").get("/console/").content.decode())
    root = titles(login("root").get("/console/").content.decode())
    installation = (Audience.OPERATORS, Audience.STAFF)
    theirs = {page.title for page in pages() if page.who in installation and page.has_view}
    assert theirs <= set(root)
    assert not theirs & set(ada)
    assert set(ada) == set(root) - theirs
    assert titles(login("nobody").get("/console/").content.decode()) == ["Home", "API reference"]


@pytest.mark.parametrize(
    ("role", "sees"),
    [
        (Role.OWNER, {"Audit log", "Webhooks", "Data"}),
        (Role.ADMIN, {"Audit log", "Webhooks"}),
        (Role.MEMBER, set()),
        (Role.VIEWER, set()),
    ],
)
def test_no_entry_leads_where_nothing_but_a_refusal_is(
    rows: None, role: Role, sees: set[str]
) -> None:
    user = User.objects.create_user("vera", "vera@example.org", PASSWORD)
    acme = Tenant.objects.get(slug="acme")
    actions.add_member(actor=SYSTEM_ACTOR, tenant=acme, user=user, role=role)
    asked = {"Audit log", "Webhooks", "Data"}

    def visible_pages() -> set[str]:
        return {e["page"].title for s in navigation(user, "/") for e in s["entries"]} & asked

    assert visible_pages() == sees
    Tenant.objects.filter(pk=acme.pk).update(active=False)
    assert visible_pages() == set()


@pytest.mark.parametrize(
    ("path", "title"),
    [
        ("/", "Playground"),
        ("/console/", "Home"),
        ("/console/keys/", "API keys"),
        ("/console/adapters/", "Adapters"),
    ],
)
def test_the_page_one_is_on_is_marked_and_no_other(login: Login, path: str, title: str) -> None:
    html = login("ada").get(path).content.decode()
    marked = re.findall(r'aria-current="page"[^>]*>.*?</svg>([^<]+)</a>', html)
    assert marked == [title]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/console/adapters/7/", "adapters"),
        *((f"/console/playground/{kind}/", "playground") for kind in TABS),
    ],
)
def test_what_lies_below_a_page_marks_it_too(rows: None, path: str, name: str) -> None:
    entries = navigation(User.objects.get(username="ada"), path)
    current = [e["page"].name for s in entries for e in s["entries"] if e["current"]]
    assert current == [name]


def test_nobody_logged_in_sees_no_navigation(client: object, login: Login) -> None:
    from django.test import Client

    assert 'aria-label="Main"' not in Client().get("/login/").content.decode()


def test_a_tenant_that_was_chosen_stays_chosen_on_other_pages(login: Login) -> None:
    root = login("root")
    assert root.get("/console/members/").context["tenant"].slug == "acme"
    root.get("/console/keys/?tenant=rival")
    assert root.get("/console/members/").context["tenant"].slug == "rival"


def test_a_strangers_tenant_is_not_kept(login: Login) -> None:
    ada = login("ada")
    ada.get("/console/keys/?tenant=rival")
    assert ada.get("/console/members/").context["tenant"].slug == "acme"
    session = ada.session
    session["tenant"] = "rival"  # one that they belonged to once
    session.save()
    assert ada.get("/console/members/").context["tenant"].slug == "acme"


def test_the_switcher_leads_to_a_page_that_shows_the_chosen_tenant(login: Login) -> None:
    root, astray = login("root"), []
    for page in pages():
        if not page.view or page.name == "playground":
            continue
        switcher = root.get(reverse(page.name)).context["switcher"]
        chosen = root.get(switcher["action"], {"tenant": "rival"}).context.get("tenant")
        if getattr(chosen, "slug", None) != "rival":
            astray.append(page.name)
    assert astray == []


def test_tenants_of_the_switcher_are_read_once_a_page(login: Login) -> None:
    root = login("root")
    with CaptureQueriesContext(connection) as queries:
        root.get("/console/people/")
    listed = [q for q in queries.captured_queries if 'FROM "tenants_tenant"' in q["sql"]]
    assert len(listed) == 1
