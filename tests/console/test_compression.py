"""What leaves compressed, and that nobody is given what was packed for another."""

from __future__ import annotations

import gzip
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.core.asgi import get_asgi_application
from django.test import Client

from inference.edge.handler import http_application
from tests.console.rows import make_rows
from tests.console.sessions import session_of
from tests.inference.asgi_client import AsgiClient, Reply

PACKED = {"accept-encoding": "gzip"}
SCRIPT = "/static/console/js/frame.js"


@pytest.fixture(autouse=True)
def _static_files(settings: Any) -> None:
    settings.SERVESTATIC_USE_FINDERS = True


@pytest.fixture
def pages(committed: None, live_redis: str) -> AsgiClient:
    """The product's pages as a server gives them."""
    make_rows()
    return AsgiClient(http_application(get_asgi_application()))


def text_of(reply: Reply) -> str:
    packed = reply.headers.get("content-encoding") == "gzip"
    return (gzip.decompress(reply.body) if packed else reply.body).decode()


@pytest.mark.parametrize("media", ["csv", "json"])
async def test_a_download_is_its_readers_alone(pages: AsgiClient, media: str) -> None:
    for name, tenant, other in (("ada", "acme", "rival"), ("olga", "rival", "acme")):
        session = await sync_to_async(session_of)(name)
        cookie = {"cookie": f"{django_settings.SESSION_COOKIE_NAME}={session}"}
        path = f"/console/audit/?format={media}"
        reply = await pages.open("GET", path, headers=PACKED | cookie).reply()
        assert reply.status == 200
        assert tenant in text_of(reply)
        assert other not in text_of(reply)


async def test_pages_and_scripts_are_packed_for_whoever_unpacks(pages: AsgiClient) -> None:
    for path in ("/login/", SCRIPT):
        baseline_reply = await pages.open("GET", path).reply()
        first = await pages.open("GET", path, headers=PACKED).reply()
        again = await pages.open("GET", path, headers=PACKED).reply()
        for reply in (first, again):
            assert reply.headers["content-encoding"] == "gzip"
            assert (
                int(reply.headers["content-length"]) == len(reply.body) < len(baseline_reply.body)
            )
        assert "content-encoding" not in baseline_reply.headers
        assert {reply.headers["vary"] for reply in (baseline_reply, first)} >= {
            baseline_reply.headers["vary"]
        }
        assert "Accept-Encoding" in baseline_reply.headers["vary"]
    assert text_of(first) == text_of(again) == text_of(baseline_reply)
    headers = PACKED | {"if-none-match": first.headers["etag"]}
    assert (await pages.open("GET", SCRIPT, headers=headers).reply()).status == 304


@pytest.mark.django_db
def test_a_synchronous_chain_packs_the_same() -> None:
    client = Client()
    baseline_response, packed = client.get("/login/"), client.get("/login/", headers=PACKED)
    assert packed["Content-Encoding"] == "gzip"
    assert int(packed["Content-Length"]) == len(packed.content) < len(baseline_response.content)
    assert b"<title>" in gzip.decompress(packed.content)
    assert "Accept-Encoding" in baseline_response["Vary"]
    assert "Content-Encoding" not in baseline_response
    script: Any = client.get(SCRIPT, headers=PACKED)
    assert script["Content-Encoding"] == "gzip"
    assert int(script["Content-Length"]) == len(script.content)
    assert client.get(SCRIPT, headers={"if-none-match": script["ETag"]}).status_code == 304
