"""The pages and the JSON of requests: who sees which, and what they tell."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from console.views.requests import SearchForm
from console.views.timeline import timeline_chart
from metering.models import RequestContent, RequestEntry, SavedSearch
from metering.request_log import (
    MediaTrace,
    OutputTrace,
    PlacementEvent,
    RequestTrace,
    called,
    encode_trace,
    request_detail_json,
)
from metering.saved_searches import FIELDS
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import AuditEntry, Role, Tenant, User
from tests.console.conftest import Login
from tests.console.seed import PASSWORD

TRACE = RequestTrace(
    header_id="theirs-1",
    admitted_ms=2.0,
    replica="r2",
    rates=(2_000_000, 1_000_000, 4_000_000),
    limits={"limit_requests": 60, "remaining_requests": 59},
    asked={"max_tokens": 50},
    media=[MediaTrace(kind="image", digest="ab" * 32, tokens=16, size_bytes=9408)],
    numerics_changed=True,
    hops=[
        PlacementEvent(at_ms=3.0, replica="r1"),
        PlacementEvent(at_ms=90.0, replica="r1", reason="its replica died"),
        PlacementEvent(at_ms=95.0, replica="r2"),
    ],
    outputs=[
        OutputTrace(
            tokens=40,
            reason="stop",
            queue_ms=20.0,
            prefill_ms=30.0,
            decode_ms=100.0,
            num_chunks=2,
            chunks=[(20, 512), (40, 90)],
            cold="evicted",
            preemptions=1,
            preempted_at=[70],
            steps=45,
            drafts=30,
            accepted=20,
            drafted=3.5,
            ahead=5,
            ahead_own=2,
            behind=["chatcmpl-before"],
        )
    ],
    tokens=[(53, 1), (100, 20), (155, 40)],
)


@pytest.fixture
def requests(rows: None) -> None:
    """One of Acme's that was served, one that was refused, one of Rival's."""
    for name in ("vera", "mia", "adam"):
        User.objects.create_user(name, f"{name}@example.org", PASSWORD)
    acme = Tenant.objects.get(slug="acme")
    for name, role in (("vera", Role.VIEWER), ("mia", Role.MEMBER), ("adam", Role.ADMIN)):
        user = User.objects.get(username=name)
        actions.add_member(actor=SYSTEM_ACTOR, tenant=acme, user=user, role=role)
    make("chatcmpl-acme", "acme", TRACE, status=200, finish_reason="stop", prompt_tokens=602)
    refused = RequestTrace(header_id="late-1", code="rate_limit_exceeded", message="Too many.")
    make("refused-1", "acme", refused, status=429, code="rate_limit_exceeded", times=7)
    make("chatcmpl-rival", "rival", TRACE, status=200)


def make(name: str, slug: str, trace: RequestTrace, **fields: Any) -> RequestEntry:
    values = {"endpoint": "chat.completions", "model": "quill", "duration_ms": 160.0, **fields}
    return RequestEntry.objects.create(
        request_id=name,
        header_id=trace.header_id,
        tenant=Tenant.objects.get(slug=slug),
        started_at=timezone.now() - timedelta(minutes=1),
        detail=encode_trace(trace),
        **values,
    )


def get(login: Login, who: str, path: str) -> Any:
    return login(who).get(path)


SEEN = {
    "root": {"chatcmpl-acme", "refused-1", "chatcmpl-rival"},
    "ada": {"chatcmpl-acme", "refused-1"},
    "adam": {"chatcmpl-acme", "refused-1"},
    "mia": {"chatcmpl-acme", "refused-1"},
    "vera": {"chatcmpl-acme", "refused-1"},
    "olga": {"chatcmpl-rival"},
    "nobody": set(),
}


@pytest.mark.parametrize("who", SEEN)
def test_each_sees_the_requests_of_their_tenants_and_no_others(
    login: Login, requests: None, who: str
) -> None:
    results = get(login, who, "/api/requests/").json()["results"]
    assert {row["id"] for row in results} == SEEN[who]
    for name in SEEN["root"]:
        status = 200 if name in SEEN[who] else 404
        for path in (f"/api/requests/{name}/", f"/console/requests/{name}/"):
            answer = get(login, who, path)
            assert answer.status_code == status, (path, who)
            assert status == 200 or "Acme" not in answer.content.decode()
    page = get(login, who, "/console/requests/?all=yes").content.decode()
    for name in SEEN["root"]:
        assert (f"/console/requests/{name}/" in page) == (name in SEEN[who])
    if who not in ("root", "olga"):
        assert get(login, who, "/console/requests/?tenant=rival").status_code == 404


def test_strangers_have_to_log_in(client: Any, requests: None) -> None:
    assert client.get("/api/requests/").status_code == 401
    assert client.get("/api/requests/chatcmpl-acme/").status_code == 401
    for path in ("/console/requests/", "/console/requests/chatcmpl-acme/"):
        assert client.get(path)["Location"].startswith("/login/")


def test_any_id_leads_to_the_request(login: Login, requests: None) -> None:
    ada = login("ada")
    for name in ("theirs-1", "chatcmpl-acme", " chatcmpl-acme "):
        answer = ada.get("/console/requests/", {"tenant": "acme", "id": name})
        assert answer["Location"] == "/console/requests/chatcmpl-acme/"
    assert ada.get("/api/requests/theirs-1/").json()["id"] == "chatcmpl-acme"
    assert ada.get("/api/requests/chatcmpl-acme~2/").json()["id"] == "chatcmpl-acme"
    assert "No request matches" in ada.get("/console/requests/?id=nothing").content.decode()


def test_requests_are_narrowed(login: Login, requests: None) -> None:
    ada = login("ada")

    def find_ids(**query: str) -> set[str]:
        return {row["id"] for row in ada.get("/api/requests/", query).json()["results"]}

    assert (
        find_ids(status="refused")
        == find_ids(status="429")
        == find_ids(status="4xx")
        == {"refused-1"}
    )
    assert find_ids(status="2xx") == find_ids(id="theirs-1") == {"chatcmpl-acme"}
    assert find_ids(model="other") == find_ids(tenant="rival") == find_ids(user="ada") == set()
    soon = (timezone.now() + timedelta(hours=1)).isoformat()
    assert find_ids(after=soon) == set()
    assert find_ids(before=soon) == {"chatcmpl-acme", "refused-1"}
    invalid_response = ada.get("/api/requests/", {"status": "odd"})
    assert (invalid_response.status_code, invalid_response.json()["error"]["param"]) == (
        400,
        "status",
    )


def test_a_search_is_not_told_of_newer_requests(login: Login, requests: None) -> None:
    ada = login("ada")
    assert b"data-newest" in ada.get("/console/requests/?tenant=acme").content
    assert b"data-newest" not in ada.get("/console/requests/?tenant=acme&model=nothing").content


def test_the_story_names_what_happened_and_of_others_only_that_there_was_work(
    login: Login, requests: None
) -> None:
    page = login("ada").get("/console/requests/theirs-1/").content.decode()
    for text in (
        "59 of 60 requests per minute left",
        "2 of this tenant&#x27;s own and other tenants&#x27; work running or waiting",
        "/console/requests/chatcmpl-before/",
        "the prefix that it shares was evicted",
        "2 chunks: 512 + 90 tokens",
        "r1: its replica died",
        "computes other bits",
        "16 tokens, 9.2",
        "ab" * 32,
        "20 of 30 draft tokens accepted, 3.5 tokens a step with drafts",
        "Preempted",
        "2 in, 1 cached, 4 out",
    ):
        assert text in page, text
    assert "3 of other tenants" not in page
    story = login("ada").get("/api/requests/theirs-1/").json()
    assert story["outputs"][0]["ahead"] == {"own": 2, "others": True}
    assert story["tokens_over_time"][-1] == [155, 40]
    root = login("root").get("/api/requests/chatcmpl-acme/").json()
    assert root["outputs"][0]["ahead"] == {"own": 2, "others": True, "num_others": 3}
    refused = login("ada").get("/console/requests/refused-1/").content.decode()
    assert "Too many." in refused
    assert "7 refusals of one kind" in refused


def test_what_generates_nothing_has_no_first_token_and_no_stop_string(
    login: Login, requests: None
) -> None:
    outputs = [
        OutputTrace(number=number, queue_ms=1.0, prefill_ms=3.0, num_chunks=1, chunks=[(1, 4)])
        for number in (0, 1)
    ]
    for trace_output in outputs:
        trace_output.steps = 1
    trace = RequestTrace(asked={"task": "embed", "dimensions": 8}, outputs=outputs)
    fields = {"endpoint": "embeddings", "finish_reason": "stop", "status": 200}
    make("embeddings-1", "acme", trace, **fields)
    page = login("ada").get("/console/requests/embeddings-1/").content.decode()
    for text in ("prompt 1: 1 chunk", "result ready", "dimensions"):
        assert text in page, text
    for text in ("First token", "stop sequence", "tokens so far", "output 0"):
        assert text not in page, text


def test_the_timeline_ends_after_the_last_event_of_either_clock(requests: None) -> None:
    entry = make("short-1", "acme", TRACE, status=200, finish_reason="stop")
    entry.duration_ms = 100.0  # the gateway's; the replica counted 150 ms after its dispatch at 3
    chart = timeline_chart(entry, request_detail_json(User.objects.get(username="ada"), entry))
    assert chart is not None
    assert chart.end_ms == 153.0
    queue, prefill, decode = (float(bar["width"]) for bar in chart.bars)
    assert (queue / prefill, decode / prefill) == pytest.approx((20 / 30, 100 / 30), rel=0.01)


@pytest.mark.parametrize(
    ("who", "reads"),
    [("ada", True), ("adam", True), ("mia", False), ("vera", False), ("root", True)],
)
def test_what_was_asked_is_for_admins_and_owners(
    login: Login, requests: None, who: str, reads: bool
) -> None:
    acme = Tenant.objects.get(slug="acme")
    RequestContent.objects.create(
        request_id="chatcmpl-acme",
        tenant=acme,
        prompt="<script>alert(1)</script>",
        answer="a quiet answer",
        at=timezone.now(),
    )
    content = login(who).get("/api/requests/chatcmpl-acme/").json()["content"]
    assert (content is not None) == reads
    page = login(who).get("/console/requests/chatcmpl-acme/").content.decode()
    assert ("a quiet answer" in page) == reads
    assert "<script>alert" not in page
    entry = RequestEntry.objects.get(request_id="chatcmpl-acme")
    entry.user = User.objects.get(username="mia")
    entry.save()
    assert login("mia").get("/api/requests/chatcmpl-acme/").json()["content"] is not None


@pytest.mark.parametrize(("who", "may"), [("ada", True), ("adam", False), ("mia", False)])
def test_owners_alone_turn_storing_on_and_it_is_in_the_audit_log(
    login: Login, requests: None, who: str, may: bool
) -> None:
    client = login(who)
    values = {"tenant": "acme", "store": "yes"}
    answer = client.post("/console/requests/store/", values)
    assert Tenant.objects.get(slug="acme").store_prompts == may
    page = client.get("/console/requests/").content.decode()
    assert ("Stop keeping prompts and answers" in page) == may
    if may:
        assert answer.status_code == 302
        assert "Prompts and answers of new requests are kept." in page
        assert AuditEntry.objects.filter(action="tenant.update").exists()
    else:
        assert answer.status_code == 403


def test_erasing_a_tenant_takes_its_requests_along(requests: None) -> None:
    acme = Tenant.objects.get(slug="acme")
    RequestContent.objects.create(
        request_id="x", tenant=acme, prompt="p", answer="a", at=timezone.now()
    )
    actions.erase_tenant(actor=SYSTEM_ACTOR, tenant=acme, confirm="acme")
    from tenants.actions.tenants import erase_tenant_data

    removed = erase_tenant_data(tenant=acme)
    assert not RequestEntry.objects.filter(tenant=acme).exists()
    assert not RequestContent.objects.exists()
    assert RequestEntry.objects.count() == 1 or removed == {}


@pytest.mark.usefixtures("requests")
def test_an_id_leads_to_its_request_though_another_came_with_it_as_header(login: Login) -> None:
    make("chatcmpl-acme-2", "acme", TRACE, status=200)
    make("chatcmpl-shadow", "rival", RequestTrace(header_id="chatcmpl-acme-2"), status=200)
    page = get(login, "root", "/console/requests/chatcmpl-acme-2/")
    assert page.context["entry"].request_id == "chatcmpl-acme-2"


def test_an_id_with_nul_characters_which_postgresql_refuses_is_looked_up_without() -> None:
    assert called("chatcmpl\0-1") == called("chatcmpl-1")


def views_of(page: Any) -> list[tuple[str, bool]]:
    return [(view["name"], view["current"]) for view in page.context["views"]]


def test_a_view_keeps_filters_and_order_for_its_person_alone(login: Login, requests: None) -> None:
    client = login("ada")
    query = "status=refused&sort=-duration_ms&tenant=acme&page=2&nonsense=1"
    answer = client.post(
        "/console/requests/views/save/", {"name": " Refused  ones ", "query": query}
    )
    page = client.get(answer.headers["Location"])
    assert ("Refused ones", True) in views_of(page)
    assert [entry.request_id for entry in page.context["page"]] == ["refused-1"]
    assert {chip["label"] for chip in page.context["chips"]} == {"Status: refused"}
    assert SavedSearch.objects.get().query == "status=refused&sort=-duration_ms"
    assert ("Refused ones", False) in views_of(client.get("/console/requests/?tenant=acme"))
    assert "Refused ones" not in dict(views_of(login("mia").get("/console/requests/")))


def test_a_view_is_replaced_by_name_and_deleted(login: Login, requests: None) -> None:
    client = login("ada")
    for query in ("status=refused", "status=5xx"):
        client.post("/console/requests/views/save/", {"name": "mine", "query": query})
    view = SavedSearch.objects.get()
    assert view.query == "status=5xx"
    assert login("mia").post(f"/console/requests/views/{view.pk}/delete/").status_code == 404
    answer = client.post(f"/console/requests/views/{view.pk}/delete/", {"tenant": "acme"})
    assert answer.headers["Location"] == "/console/requests/?tenant=acme"
    assert not SavedSearch.objects.exists()


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({"name": " ", "query": "status=5xx"}, "name"),
        ({"name": "x" * 81, "query": "status=5xx"}, "name"),
        ({"name": "a\0b", "query": "status=5xx"}, "name"),
        ({"name": "x", "query": ""}, "query"),
        ({"name": "x", "query": "tenant=acme"}, "query"),
        ({"name": "x", "query": "model=" + "m" * 2000}, "query"),
    ],
)
def test_a_view_that_cannot_be_saved_says_why(
    login: Login, requests: None, sent: dict[str, str], field: str
) -> None:
    answer = login("ada").post("/console/requests/views/save/", sent)
    assert answer.status_code == 400
    assert answer.context["error"].param == field
    assert not SavedSearch.objects.exists()


def test_views_are_saved_listed_and_deleted_by_rest(login: Login, requests: None) -> None:
    assert (*SearchForm.base_fields, "sort") == FIELDS
    client, url = login("ada"), "/api/saved-views/"

    def send(name: str, query: str) -> Any:
        sent = {"name": name, "query": query}
        return client.post(url, json.dumps(sent), content_type="application/json")

    response = send("slow", "sort=-duration&tenant=rival&page=3&slower_ms=2000")
    assert response.status_code == 201
    assert response.json()["query"] == "slower_ms=2000&sort=-duration"
    again = send("slow", "slower_ms=9000").json()
    assert again == {"id": response.json()["id"], "name": "slow", "query": "slower_ms=9000"}
    assert [view["id"] for view in client.get(url).json()["results"]] == [again["id"]]
    assert ("slow", False) in views_of(client.get("/console/requests/?tenant=acme"))
    assert send("empty", "tenant=acme").json()["error"]["param"] == "query"
    other, address = login("mia"), f"{url}{again['id']}/"
    assert other.get(url).json()["results"] == []
    assert other.get(address).status_code == other.delete(address).status_code == 404
    assert client.delete(address).status_code == 204
    assert not SavedSearch.objects.exists()
    assert login("nobody").get(url).json()["results"] == []
    acme = Tenant.objects.get(slug="acme")
    account = actions.create_service_account(
        actor=SYSTEM_ACTOR, tenant=acme, name="bot", role=Role.ADMIN
    )
    key = actions.create_key(
        actor=SYSTEM_ACTOR,
        tenant=acme,
        name="bot",
        service_account=account,
        scopes=["tenant:admin"],
    )
    refused = Client().get(url, headers={"authorization": f"Bearer {key.secret}"})
    assert refused.status_code == 403
    assert "nobody holds this key" in refused.json()["error"]["message"]


def test_a_person_saves_a_bounded_number_of_views(login: Login, requests: None) -> None:
    ada = User.objects.get(username="ada")
    SavedSearch.objects.bulk_create(
        SavedSearch(user=ada, name=f"view {number}", query="status=5xx") for number in range(50)
    )
    sent = {"name": "one more", "query": "status=5xx"}
    assert login("ada").post("/console/requests/views/save/", sent).status_code == 409
    sent["name"] = "view 7"
    assert login("ada").post("/console/requests/views/save/", sent).status_code == 302
    assert SavedSearch.objects.count() == 50


def test_the_view_of_slow_requests_has_those_above_two_seconds_slowest_first(
    login: Login, requests: None
) -> None:
    for name, duration in (("quick", 1999.0), ("slow", 2000.0), ("slower", 9000.0)):
        make(name, "acme", RequestTrace(), status=200, duration_ms=duration)
    page = login("ada").get("/console/requests/?tenant=acme")
    (query,) = [view["query"] for view in page.context["views"] if "2 s" in view["name"]]
    page = login("ada").get(f"/console/requests/?{query}")
    assert [entry.request_id for entry in page.context["page"]] == ["slower", "slow"]


def test_a_list_with_filters_says_nothing_of_newer_requests(login: Login, requests: None) -> None:
    client = login("ada")
    assert "data-newest" in client.get("/console/requests/?tenant=acme").content.decode()
    page = client.get("/console/requests/?tenant=acme&model=nothing").content.decode()
    assert "data-newest" not in page
    assert "No request matches." in page


def test_one_line_says_how_the_last_hour_went(login: Login, requests: None) -> None:
    def line(query: str = "") -> str:
        page = login("ada").get(f"/console/requests/?tenant=acme{query}").content.decode()
        lead = page.partition('<p class="page-lead">')[2].partition("</p>")[0]
        return re.sub("<[^>]+>", "", lead)

    RequestEntry.objects.all().delete()
    assert line() == "No request in the last hour."
    make("one", "acme", RequestTrace(), status=200, duration_ms=12_340.0)
    assert line() == "1 request in the last hour, none failed, slowest 12.3 s."
    make("two", "acme", RequestTrace(), status=503, duration_ms=40.0)
    make("other", "rival", RequestTrace(), status=503, duration_ms=90_000.0)
    make("old", "acme", RequestTrace(), status=503, duration_ms=90_000.0)
    an_hour_ago = timezone.now() - timedelta(hours=1)
    RequestEntry.objects.filter(request_id="old").update(started_at=an_hour_ago)
    text = "2 requests in the last hour, 1 failed, slowest 12.3 s."
    assert line() == line("&model=nothing") == text


def test_filters_seldom_used_are_behind_a_button_and_open_when_invalid(
    login: Login, requests: None
) -> None:
    client = login("ada")
    page = client.get("/console/requests/?tenant=acme&user=ada")
    form = page.context["form"]
    assert [field.name for field in form.usual_fields] == ["id", "model", "status", "slower_ms"]
    assert {chip["label"] for chip in page.context["chips"]} == {"Person: ada"}
    assert '<details class="rare-filters">' in page.content.decode()
    page = client.get("/console/requests/?tenant=acme&first=yesterday").content.decode()
    assert '<details class="rare-filters" open>' in page
