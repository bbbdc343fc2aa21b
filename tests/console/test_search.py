"""Ctrl-K's search: each kind by name or id, and nothing that isn't the reader's."""

from __future__ import annotations

from typing import Any

import pytest

from metering.models import RequestEntry
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Tenant
from tests.console.conftest import Login
from tests.console.test_requests import TRACE, make

pytestmark = pytest.mark.usefixtures("rows")


def kinds(login: Login, name: str, query: str) -> set[tuple[str, str]]:
    results = login(name).get("/console/api/find", {"q": query}).json()["results"]
    return {(match["kind"], match["title"]) for match in results}


def test_models_people_tenants_keys_and_requests_are_found_by_name_or_id(login: Login) -> None:
    acme = Tenant.objects.get(slug="acme")
    actions.create_key(actor=SYSTEM_ACTOR, tenant=acme, name="website")
    make("chatcmpl-acme", "acme", TRACE, status=200)
    assert ("Model", "acme-private") in kinds(login, "ada", "private")
    assert ("Person", "ada") in kinds(login, "ada", "ad")
    assert ("Tenant", "Acme") in kinds(login, "ada", "acme")
    assert ("API key", "website") in kinds(login, "ada", "web")
    assert ("Request", "theirs-1") in kinds(login, "ada", "theirs-1")
    assert ("Model", "rival-private") in kinds(login, "root", "rival")


def test_nothing_of_other_tenants_is_found(login: Login) -> None:
    make("chatcmpl-acme", "acme", TRACE, status=200)
    for query in ("acme", "ada", "theirs-1", "chatcmpl-acme", "private"):
        matches = kinds(login, "olga", query)
        assert matches <= {("Model", "rival-private")}, query
        assert kinds(login, "nobody", query) == set()


def test_an_empty_question_finds_nothing(login: Login) -> None:
    assert kinds(login, "root", " \0 ") == set()


def test_requests_are_sorted_narrowed_and_summed_up(login: Login) -> None:
    for number, duration in enumerate((50.0, 3000.0, 700.0)):
        make(f"chatcmpl-{number}", "acme", TRACE, status=200, duration_ms=duration)
    ada = login("ada")

    def listed(**query: Any) -> list[str]:
        page = ada.get("/console/requests/", {"tenant": "acme", **query})
        assert page.status_code == 200
        return [entry.request_id for entry in page.context["page"]]

    assert listed(sort="-duration_ms") == ["chatcmpl-1", "chatcmpl-2", "chatcmpl-0"]
    assert listed(sort="duration_ms") == ["chatcmpl-0", "chatcmpl-2", "chatcmpl-1"]
    assert listed(sort="no-column; --") == ["chatcmpl-2", "chatcmpl-1", "chatcmpl-0"]
    assert listed(slower_ms="2000") == ["chatcmpl-1"]
    assert listed(slower_ms="many") == []
    moment = RequestEntry.objects.get(request_id="chatcmpl-1").started_at.timestamp()
    assert listed(since=f"{moment:.6f}", until=f"{moment + 1e-5:.6f}") == ["chatcmpl-1"]
    summary = ada.get("/console/requests/", {"tenant": "acme"}).context["summary"]
    counts = {bar.label: bar.count for bar in summary.durations if bar.count}
    assert counts == {"<100 ms": 1, "<1 s": 1, "<5 s": 1}
