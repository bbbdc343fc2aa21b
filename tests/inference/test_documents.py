"""Documents in chats, responses and messages, before a model that takes no images."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from common.errors import RateLimited
from engine.contract.errors import InvalidRequest
from engine.contract.messages import ModelInfo
from engine.multimodal.documents import MAX_TEXT_CHARS
from engine.multimodal.inputs import PreparedDocument, Refusal
from engine.text.tokenizer import Tokenizer
from inference.errors import Overloaded
from inference.rendering import media_pool
from inference.rendering.documents import read_documents
from inference.rendering.media_pool import MediaPool
from inference.rendering.media_sources import MediaSource, admit_sources, find_media
from tenants.authentication import Caller
from tenants.caller import MediaLimits
from tenants.models import ApiKey
from tests.engine.multimodal.pdfs import encrypted_pdf, pdf
from tests.inference.asgi_client import Reply
from tests.inference.conftest import Gateway
from tests.inference.forms import upload
from tests.inference.scripted import says
from tests.inference.strangers import stranger
from tests.platform.callers import CALLER

REPORT = pdf(["Foxes jump", "", "Dogs sleep"])
#: What the model reads of it.
PAGES = (
    "report.pdf\nPage 1 of 3:\nFoxes jump\n",
    "Page 2 of 3:\n(This page has no text.)\n",
    "Page 3 of 3:\nDogs sleep\n",
)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def file_part(data: bytes, **fields: str) -> dict[str, Any]:
    """A chat's document."""
    url = f"data:application/pdf;base64,{encoded(data)}"
    return {"type": "file", "file": {"file_data": url, **fields}}


async def ask(gateway: Gateway, *parts: dict[str, Any], client: Any = None) -> Reply:
    content = [*parts, {"type": "text", "text": "What sleeps?"}]
    return await (client or gateway.client).chat(messages=[{"role": "user", "content": content}])


async def test_all_interfaces_show_the_model_the_pages_of_a_pdf(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, "dogs"))
    client = gateway.client
    file_id = (await upload(client, REPORT, filename="report.pdf", purpose="user_data")).json()[
        "id"
    ]
    question = {"type": "input_text", "text": "What sleeps?"}
    files: list[dict[str, Any]] = [
        {"file_data": encoded(REPORT), "filename": "report.pdf"},
        {"file_id": file_id},
    ]
    source = {"type": "base64", "media_type": "application/pdf", "data": encoded(REPORT)}
    document = {"type": "document", "title": "report.pdf", "source": source}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [document]}
    call = {"type": "tool_use", "id": "c", "name": "read", "input": {}}
    async with gateway.serving(replica):
        assert (await ask(gateway, file_part(REPORT, filename="report.pdf"))).status == 200
        for file in files:
            assert (await ask(gateway, {"type": "file", "file": file})).status == 200
            item = {"role": "user", "content": [{"type": "input_file", **file}, question]}
            body = {"model": "fake", "input": [item]}
            assert (await client.post("/v1/responses", body)).status == 200
        for content in (
            [{"role": "user", "content": [document]}],
            [
                {"role": "user", "content": "Read"},
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ],
        ):
            body = {"model": "fake", "max_tokens": 9, "messages": content}
            assert (await client.post("/v1/messages", body)).status == 200
    assert len(replica.received) == 7
    for request in replica.received:
        text = tokenizer.decode(request.prompt_token_ids)
        positions = [text.index(page) for page in PAGES]
        assert positions == sorted(positions)


async def test_a_document_of_text_is_text(gateway: Gateway, tokenizer: Tokenizer) -> None:
    replica = gateway.scripted(says(tokenizer, "dogs"))
    async with gateway.serving(replica):
        for data in (b"a,b\n1,2", b"\xef\xbb\xbfa,b\n1,2"):
            assert (await ask(gateway, file_part(data, filename="table.csv"))).status == 200
    for request in replica.received:
        assert "table.csv\na,b\n1,2\n" in tokenizer.decode(request.prompt_token_ids)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (file_part(encrypted_pdf()), "it is encrypted"),
        (file_part(b"%PDF-1.7\n"), "no PDF or damaged"),
        (file_part(b"\x89PNG\r\n\x1a\n\0\0"), "no PDF or damaged"),
        (file_part(pdf([""])), "has no text, and the model fake takes no images"),
        ({"type": "file", "file": {"file_data": "!"}}, "base64 can't be read"),
        ({"type": "file", "file": {"file_url": "http://127.0.0.1/x.pdf"}}, ""),
        ({"type": "file", "file": {"file_id": "file-0"}}, "file-0"),
        ({"type": "file", "file": {"filename": "x"}}, "needs one of"),
        ({"type": "file", "file": {"file_id": "a", "file_data": "AA=="}}, "needs one of"),
        ({"type": "file"}, "needs the field 'file'"),
    ],
)
async def test_documents_that_cannot_be_read_are_refused_by_part(
    gateway: Gateway, tokenizer: Tokenizer, part: dict[str, Any], message: str
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, ""))):
        reply = await ask(gateway, {"type": "text", "text": "Read"}, part)
    assert reply.status == 400
    error = reply.json()["error"]
    assert message in error["message"]
    assert error["param"].replace(".", "[").replace("]", "").startswith("messages[0[content[1")


async def test_media_over_a_keys_limit_are_refused_by_part_before_they_are_read(
    gateway: Gateway, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.to_thread(
        lambda: ApiKey.objects.filter(pk=gateway.rows.key.pk).update(media_per_minute=2)
    )
    part = file_part(b"a,b")
    question = {"type": "text", "text": "Read"}
    async with gateway.serving(gateway.scripted(says(tokenizer, "dogs"))):
        assert (await ask(gateway, question, part, part)).status == 200
        monkeypatch.setattr(media_pool, "read_source", lambda source: pytest.fail("it was read"))
        for parts in ([question, part, part], [question, part, part, part]):
            refused = await ask(gateway, *parts)
            error = refused.json()["error"]
            assert (refused.status, error["code"]) == (429, "rate_limit_exceeded")
            assert error["param"] == "messages[0].content[1]"
            assert "2 media a minute" in error["message"] or "has 3 media" in error["message"]
            assert refused.headers["retry-after"]


@pytest.mark.usefixtures("gateway")
async def test_documents_and_images_of_a_request_are_admitted_by_their_sum() -> None:
    info = ModelInfo(
        name="m", path="", max_model_len=9, vocab_size=9, dtype="", sees=True, max_images=4
    )
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [file_part(b"a,b"), image, file_part(b"c,d")]
    sources = find_media([{"role": "user", "content": content}], info)
    two, three = (replace(CALLER, media_limits=MediaLimits(media=count)) for count in (2, 3))
    with pytest.raises(RateLimited, match="has 3 media, but the limit of this tenant is 2"):
        await admit_sources(sources, two)
    assert await admit_sources(sources, three) == sources
    with pytest.raises(RateLimited, match="3 media a minute") as refused:
        await admit_sources(sources[1:2], three)
    assert refused.value.param == "messages[0].content[1]"


async def test_another_tenants_document_is_not_read(gateway: Gateway, tokenizer: Tokenizer) -> None:
    file_id = (await upload(gateway.client, b"secret", purpose="user_data")).json()["id"]
    other = await asyncio.to_thread(stranger)
    async with gateway.serving(gateway.scripted(says(tokenizer, ""))):
        part = {"type": "file", "file": {"file_id": file_id}}
        reply = await ask(gateway, part, client=other)
    assert reply.status in (400, 404)
    assert "secret" not in reply.body.decode()


async def test_a_document_is_read_once_for_each_tenant() -> None:
    pool = MediaPool()
    url = f"data:;base64,{encoded(REPORT)}"
    source = MediaSource(url, "messages[0].content[0]", kind="document")
    other = replace(CALLER, tenant_id=9)
    first, again, other_document = [
        await pool.read_document(source, 0, asking) for asking in (CALLER, CALLER, other)
    ]
    assert first is again
    assert first is not other_document
    drawn = await pool.read_document(source, 3, CALLER)
    assert all(page.image for page in drawn.pages)


@pytest.mark.parametrize(("max_bytes", "max_documents"), [(1000, 19), (0, 0)])
async def test_no_more_than_the_limit_is_cached_pages_without_text_included(
    settings: Any, max_bytes: int, max_documents: int
) -> None:
    settings.QUIRE = settings.QUIRE.replace(media_cache_bytes=max_bytes)
    pool = MediaPool()
    for number in range(max_documents + 11):
        url = f"data:;base64,{encoded(pdf(['']) + b'%% %d' % number)}"
        await pool.read_document(MediaSource(url, "messages", kind="document"), 0, CALLER)
    assert bool(max_bytes) <= len(pool._prepared) <= max_documents


async def test_a_tenants_waiting_files_have_bounded_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    release, pool = threading.Event(), MediaPool()
    loop, started = asyncio.get_running_loop(), asyncio.Queue[None]()

    def ask_worker(*_: Any) -> tuple[PreparedDocument, float]:
        loop.call_soon_threadsafe(started.put_nowait, None)
        release.wait(10)
        return PreparedDocument([]), 1.0

    monkeypatch.setattr(pool, "_ask_worker", ask_worker)
    monkeypatch.setattr(media_pool, "TENANT_WAITING_BYTES", 1000)

    def read(name: bytes, caller: Caller) -> Coroutine[Any, Any, PreparedDocument]:
        url = f"data:;base64,{encoded(b'%PDF-' + name * 600)}"
        return pool.read_document(MediaSource(url, "messages", kind="document"), 0, caller)

    other = replace(CALLER, tenant="other", tenant_id=9)
    waiting = [asyncio.ensure_future(read(b"a", caller)) for caller in (CALLER, other)]
    for _ in waiting:
        await asyncio.wait_for(started.get(), 10)
    with pytest.raises(Overloaded):
        await read(b"c", CALLER)
    release.set()
    await asyncio.gather(*waiting, read(b"a", CALLER))
    await read(b"c", CALLER)
    monkeypatch.setattr(media_pool, "TENANT_WAITING_BYTES", 100)
    await read(b"d", CALLER)  # it is larger, and nothing else waits


async def test_a_waiting_file_whose_client_goes_away_takes_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, pool = threading.Event(), MediaPool()
    loop, started = asyncio.get_running_loop(), asyncio.Queue[None]()

    def ask_worker(*_: Any) -> tuple[Refusal, float]:
        loop.call_soon_threadsafe(started.put_nowait, None)
        release.wait(10)
        return Refusal("no sound"), 1.0

    monkeypatch.setattr(pool, "_ask_worker", ask_worker)
    asking = [
        asyncio.ensure_future(pool.prepare_sound(b"RIFF%d" % number, 80, 100, CALLER))
        for number in range(media_pool.NUM_WORKERS + 1)
    ]
    for _ in range(media_pool.NUM_WORKERS):
        await asyncio.wait_for(started.get(), 10)
    while not pool._preparers._queues:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    asking[-1].cancel()
    await asyncio.wait(asking[-1:])
    [(_, job)] = pool._preparers._queues[CALLER.tenant]
    assert "RIFF" not in str([cell.cell_contents for cell in job.__closure__ or ()])
    release.set()
    assert all(
        isinstance(error, InvalidRequest)
        for error in await asyncio.gather(*asking[:-1], return_exceptions=True)
    )


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ([pdf(["a", "b"]), pdf(["c", "d"]), pdf(["e"]), b"never read"], "have 5 and 5"),
        ([b"a" * (MAX_TEXT_CHARS // 2)] * 2 + [b"a", b"never read"], f"0 and {MAX_TEXT_CHARS + 1}"),
    ],
    ids=["pages", "text"],
)
async def test_documents_of_a_request_are_limited_together(
    files: list[bytes], problem: str
) -> None:
    info = ModelInfo(
        name="m", path="", max_model_len=9, vocab_size=9, dtype="", sees=True, max_images=4
    )
    content = [file_part(data) for data in files]
    at_limit = [{"role": "user", "content": content[:2]}]
    assert len(await read_documents(find_media(at_limit, info), info, CALLER)) == 2
    sources = find_media([{"role": "user", "content": content}], info)
    with pytest.raises(InvalidRequest, match=problem) as refused:
        await read_documents(sources, info, CALLER)
    assert refused.value.param == "messages[0].content[2]"
