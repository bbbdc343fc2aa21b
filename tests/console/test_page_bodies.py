"""FAULTS 52 for pages: what strangers send to them is refused before it's read or kept on disk."""

from __future__ import annotations

from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.core.asgi import get_asgi_application

from inference.edge.handler import http_application
from tests.console.rows import make_rows
from tests.console.sessions import session_of
from tests.inference.asgi_client import AsgiClient

FORM = {"content-type": "application/x-www-form-urlencoded"}
PART = b"x" * (8 << 10)


@pytest.fixture
def pages(committed: None, live_redis: str) -> AsgiClient:
    """The product's pages, behind what bounds them."""
    make_rows()
    return AsgiClient(http_application(get_asgi_application()))


@pytest.mark.parametrize("announced", [{"content-length": str(8 << 20)}, {}])
@pytest.mark.parametrize(
    "path", ["/login/", "/console/files/upload/", "/no/such/page", "/api/users/"]
)
async def test_fault_52_a_strangers_body_is_refused_before_it_is_read(
    pages: AsgiClient, path: str, announced: dict[str, str]
) -> None:
    exchange = pages.open("POST", path, parts=[PART] * 1000, headers={**FORM, **announced})
    reply = await exchange.reply()
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert reply.headers["connection"] == "close"
    assert len(exchange.received) <= (0 if announced else 3)


async def test_a_browser_gets_a_page_and_a_wrong_key_is_401(pages: AsgiClient) -> None:
    headers = {**FORM, "accept": "text/html", "content-length": str(8 << 20)}
    reply = await pages.open("POST", "/login/", parts=[PART], headers=headers).reply()
    assert reply.status == 413
    assert "Too much at once" in reply.body.decode()
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    key = {**FORM, "authorization": "Bearer sk-quire-nobody", "content-length": str(8 << 20)}
    reply = await pages.open("POST", "/api/users/", parts=[PART], headers=key).reply()
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")


async def test_whoever_is_logged_in_may_send_more_and_files_more_still(
    pages: AsgiClient, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_body_bytes=64 << 10, max_file_bytes=128 << 10)
    session = await sync_to_async(session_of)("ada")
    cookie = {**FORM, "cookie": f"{django_settings.SESSION_COOKIE_NAME}={session}"}
    statuses = [
        (await pages.open("POST", path, parts=[PART] * count, headers=cookie).reply()).status
        for path, count in (
            ("/console/keys/", 7),
            ("/console/keys/", 9),
            ("/console/files/upload/", 9),
            ("/console/files/upload/", 150),
        )
    ]
    assert statuses == [403, 413, 403, 413]  # 403: read, and without a form's token


async def test_fault_52_a_form_that_never_comes_is_given_up(
    pages: AsgiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.edge.body.BODY_TIMEOUT_S", 0.05)
    headers = {**FORM, "content-length": "10"}
    reply = await pages.open("POST", "/login/", parts=[], headers=headers).reply()
    assert (reply.status, reply.error["code"]) == (408, "request_timeout")
