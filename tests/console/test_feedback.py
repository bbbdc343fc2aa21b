"""Feedback on answers: who may give and export it, and what it looks like."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.utils import timezone

from metering.models import RequestContent, RequestFeedback
from tenants.models import Tenant
from tests.console.conftest import Login
from tests.console.test_requests import TRACE, make, requests  # noqa: F401  # a fixture

pytestmark = pytest.mark.usefixtures("requests")
PATH = "/console/api/feedback/chatcmpl-acme"


def give(login: Login, name: str, path: str = PATH, **body: Any) -> Any:
    return login(name).post(path, json.dumps(body), content_type="application/json")


def test_a_member_says_what_an_answer_is_worth_changes_it_and_takes_it_back(login: Login) -> None:
    assert give(login, "mia", good=True).json() == {"good": True, "comment": ""}
    assert give(login, "mia", good=False, comment="Too long.").status_code == 200
    assert give(login, "adam", good=True).status_code == 200
    rows = RequestFeedback.objects.values_list("user__username", "is_good", "comment")
    assert set(rows) == {("mia", False, "Too long."), ("adam", True, "")}
    page = login("ada").get("/console/requests/chatcmpl-acme/").content.decode()
    assert "Too long." in page
    assert give(login, "mia", good=None).json() == {"good": None, "comment": ""}
    assert RequestFeedback.objects.get().user.username == "adam"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"good": "yes"}, "good"),
        ({"good": True, "comment": 5}, "comment"),
        ({"good": True, "comment": "x" * 2001}, "comment"),
        ({"good": True, "comment": "a\0b"}, "comment"),
        ({"good": True, "stars": 5}, "stars"),
    ],
)
def test_bad_feedback_names_its_field(login: Login, body: dict[str, Any], param: str) -> None:
    answer = give(login, "mia", **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not RequestFeedback.objects.exists()


def test_others_requests_get_no_feedback(login: Login) -> None:
    for name in ("olga", "nobody"):
        assert give(login, name, good=True).status_code == 404
    assert not RequestFeedback.objects.exists()


def test_admins_export_it_with_prompts_and_answers_that_are_kept(login: Login) -> None:
    acme = Tenant.objects.get(slug="acme")
    make("chatcmpl-second", "acme", TRACE, status=200)
    RequestContent.objects.create(
        request_id="chatcmpl-acme", tenant=acme, prompt="Hi?", answer="Hé!", at=timezone.now()
    )
    give(login, "mia", good=False, comment="No.")
    give(login, "mia", "/console/api/feedback/chatcmpl-second", good=True)
    answer = login("adam").get("/console/feedback/export/", {"tenant": "acme"})
    lines = [json.loads(line) for line in b"".join(answer.streaming_content).splitlines()]
    rows = [(line["good"], line["comment"], line["prompt"], line["answer"]) for line in lines]
    assert rows == [(False, "No.", "Hi?", "Hé!"), (True, "", None, None)]
    assert lines[0]["model"] == "quill"
    assert login("mia").get("/console/feedback/export/", {"tenant": "acme"}).status_code == 403
    assert login("olga").get("/console/feedback/export/", {"tenant": "acme"}).status_code == 404
