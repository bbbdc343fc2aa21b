"""Errors have the console's look in a browser."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from django.core.exceptions import PermissionDenied, SuspiciousOperation
from django.http import HttpRequest
from django.test import Client, RequestFactory
from django.views import defaults

from tests.console.markup import inline_code

#: What browsers say that they read.
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def request_of(user: object = None) -> HttpRequest:
    request = RequestFactory().get("/somewhere")
    request.user = user or SimpleNamespace(is_authenticated=False, is_staff=False)
    return request


def test_an_unknown_page_is_404_with_our_page(rows: None, client: Client) -> None:
    response = client.get("/no/such/page", headers={"accept": BROWSER})
    assert response.status_code == 404
    html = response.content.decode()
    assert "No such page" in html
    assert "To the playground" in html
    assert inline_code(html) == []


def test_the_404_page_does_not_repeat_the_address(rows: None, client: Client) -> None:
    path = "/%3Cscript%3Ealert(1)%3C/script%3E"
    response = client.get(path, headers={"accept": BROWSER})
    assert b"alert(1)" not in response.content
    assert client.get(path).headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("post", "/chat/completions", "/v1/chat/completions"),
        ("post", "/completions", "/v1/completions"),
        ("get", "/models", "/v1/models"),
        ("post", "/messages", "/v1/messages"),
        ("get", "/no/such/page", "/openapi.json"),
    ],
)
def test_a_client_with_the_wrong_address_is_told_the_right_one(
    rows: None, client: Client, method: str, path: str, meant: str
) -> None:
    response = getattr(client, method)(path, headers={"accept": "*/*"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "unknown_url")
    assert path in error["message"]
    assert meant in error["message"]


def test_a_stale_form_is_explained(rows: None) -> None:
    client = Client(enforce_csrf_checks=True)
    response = client.post("/login/", {"login": "ada", "password": "x"})
    assert response.status_code == 403
    assert "This form has expired" in response.content.decode()
    assert "Content-Security-Policy" in response


def test_a_host_that_is_not_ours_is_told_which_setting_names_them(
    rows: None, client: Client
) -> None:
    response = client.get("/", headers={"accept": BROWSER, "host": "new-server.example"})
    assert response.status_code == 400
    html = response.content.decode()
    assert "QUIRE_ALLOWED_HOSTS" in html
    assert "new-server" not in html
    assert inline_code(html) == []


@pytest.mark.parametrize(
    ("view", "status", "words"),
    [
        (lambda r: defaults.permission_denied(r, PermissionDenied()), 403, "Permission denied"),
        (lambda r: defaults.bad_request(r, SuspiciousOperation()), 400, "Bad request"),
        (defaults.server_error, 500, "Something broke"),
    ],
)
def test_the_other_errors_have_pages_that_need_no_database(
    view: object, status: int, words: str
) -> None:
    response = view(request_of())  # type: ignore[operator]
    assert response.status_code == status
    html = response.content.decode()
    assert words in html
    assert inline_code(html) == []
