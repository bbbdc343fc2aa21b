"""The whole URLconf: each route asks who one is, or is on a list that somebody has looked at."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from django.contrib.admindocs.views import simplify_regex
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

#: What strangers may reach, and why.
REVIEWED = {
    "login/": "the way in",
    "logout/": "ends a session; for strangers it leads to the login",
    "account/signup/": "says that nobody signs up",
    "account/inactive/": "a sentence",
    "account/password/reset/": "takes a mail address, tells nothing about it",
    "account/password/reset/done/": "a sentence",
    "account/password/reset/key/<uidb36>-<key>/": "whoever has the mailed link",
    "account/password/reset/key/done/": "a sentence",
    "account/2fa/authenticate/": "the second step of the login; without the first it leads there",
    "account/sign-on/login/cancelled/": "a sentence",
    "account/sign-on/login/error/": "a sentence",
    "account/sign-on/signup/": "needs a sign-on that has begun",
    "account/oidc/<provider_id>/login/": "to the identity provider",
    "account/oidc/<provider_id>/login/callback/": "back from it, with a state of ours",
    "invitation/<token>/": "whoever has the link",
    "reference/": "the API's document, which is no secret",
    "openapi.json": "the same for machines",
    "styles/<name>-<digest>.css": "how pages look",
    "health": "well or not, and no more to strangers",
    "live": "whether the process answers",
    "ready": "whether it may be sent requests",
    "ping": "whether the process answers",
    "version": "which Quire",
    "admin/login/": "leads to the login",
    "admin/logout/": "ends a session; for strangers it leads to the login",
    "admin/jsi18n/": "words of Django's own scripts",
    "v1": "says that there is no such path",
    "v1/messages/": "the same, in Anthropic's envelope",
}
ASKED = (401, 403)


def routes() -> Iterator[str]:
    """Every route of the product, with its parts in angle brackets."""

    def walk(patterns: list[URLPattern | URLResolver], parent_path: str) -> Iterator[str]:
        for pattern in patterns:
            path = parent_path + str(pattern.pattern)
            if isinstance(pattern, URLResolver):
                yield from walk(pattern.url_patterns, path)
            else:
                yield path

    for raw in walk(get_resolver().url_patterns, ""):
        baseline = simplify_regex(raw.replace(r"(?:/.*)?", "").replace(".*", ""))
        baseline = re.sub(r"<\w+:(\w+)>", r"<\1>", baseline.lstrip("/"))
        yield baseline.replace("\\Z", "")


def sample(route: str) -> str:
    """A path that the route matches."""
    text = re.sub(r"<tenant>|<slug>", "acme", route)
    text = text.replace("<uidb36>-<key>", "1-abc-def").replace("<content_type_id>", "1")
    text = text.replace("<public_id>", f"upload-{0:032x}").replace("<operation>", "check")
    return "/" + re.sub(r"<\w+>", "1", text)


ALL = sorted(set(routes()))


def test_the_walk_finds_all_kinds_of_routes() -> None:
    assert {"console/members/", "v1/chat/completions", "api/users/"} <= set(ALL)
    assert any(route.startswith("admin/tenants/user/") for route in ALL)
    assert len(ALL) > 150


@pytest.mark.django_db(transaction=True)
def test_each_route_asks_who_one_is_or_was_looked_at() -> None:
    client = Client(raise_request_exception=False)
    open_ones = []
    for route in (route for route in ALL if route not in REVIEWED):
        answers = {}
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
            answer = client.generic(method, sample(route), content_type="application/json")
            answers[method] = answer.status_code, answer.headers.get("Location", "")
        # A method that a route doesn't have is refused before anybody is asked.
        had = {method: outcome for method, outcome in answers.items() if outcome[0] != 405}
        if not had or not all(asks(*outcome) for outcome in had.values()):
            open_ones.append((route, answers))
    assert open_ones == []


def asks(status: int, leads: str) -> bool:
    """Whether an answer asks who one is."""
    return status in ASKED or (status == 302 and ("/login/" in leads or "/reauth" in leads))


def test_the_list_holds_nothing_that_is_gone() -> None:
    assert set(REVIEWED) - set(ALL) == set()
