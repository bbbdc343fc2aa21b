"""Chat completions that are kept: made with `store`, listed, changed, forgotten."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from openai.types.chat import ChatCompletion, ChatCompletionStoreMessage

from engine.text.tokenizer import Tokenizer
from storage.actions import remove_expired
from storage.models import StoredCompletion
from tests.inference.asgi_client import Reply
from tests.inference.conftest import Gateway
from tests.inference.scripted import says
from tests.inference.strangers import stranger

URL = "/v1/chat/completions"


async def ask(gateway: Gateway, text: Any = "hello", **fields: Any) -> Reply:
    fields = {"store": True, "messages": [{"role": "user", "content": text}]} | fields
    return await gateway.client.post(URL, {"model": "fake", "max_tokens": 5, **fields})


async def ids(gateway: Gateway, query: str = "") -> list[str]:
    return [item["id"] for item in (await gateway.client.get(f"{URL}?{query}")).json()["data"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_answered_is_kept(
    gateway: Gateway, tokenizer: Tokenizer, stream: bool
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "a fox"))):
        reply = await ask(gateway, stream=stream, metadata={"k": "v"})
    event = reply.events[0] if stream else reply.json()
    retained_payload = (await gateway.client.get(f"{URL}/{event['id']}")).json()
    completion = ChatCompletion.model_validate(retained_payload)
    assert completion.choices[0].message.content == "a fox"
    assert completion.usage is not None
    assert retained_payload["metadata"] == {"k": "v"}
    assert stream or retained_payload == event


async def test_without_store_nothing_is_kept(served: Gateway) -> None:
    for fields in ({"store": False}, {"store": None}):
        payload = (await ask(served, **fields)).json()
        assert (await served.client.get(f"{URL}/{payload['id']}")).status == 404
    assert await ids(served) == []


async def test_they_are_listed_in_pages_and_chosen_by_their_metadata(served: Gateway) -> None:
    tags: list[dict[str, str]] = [{"a": "1"}, {"a": "1", "b": "x_y"}, {"A": "1"}, {"b": 'x"y'}, {}]
    completion_ids = [(await ask(served, metadata=tag)).json()["id"] for tag in tags]
    assert await ids(served) == completion_ids
    assert await ids(served, "order=desc&limit=2") == [completion_ids[4], completion_ids[3]]
    page = (await served.client.get(f"{URL}?limit=2&after={completion_ids[1]}")).json()
    assert ([i["id"] for i in page["data"]], page["has_more"]) == (
        [completion_ids[2], completion_ids[3]],
        True,
    )
    assert await ids(served, "metadata[a]=1") == completion_ids[:2]
    assert await ids(served, "metadata[a]=1&metadata[b]=x_y") == [completion_ids[1]]
    assert await ids(served, 'metadata[b]=x"y') == [completion_ids[3]]
    assert await ids(served, "metadata[b]=x%25") == []
    assert await ids(served, "model=fake&limit=1") == completion_ids[:1]
    assert await ids(served, "model=other") == []


async def test_metadata_is_changed_and_a_completion_forgotten(served: Gateway) -> None:
    completion_id = (await ask(served, metadata={"k": "v"})).json()["id"]
    changed = await served.client.post(f"{URL}/{completion_id}", {"metadata": {"n": "w"}})
    assert changed.json()["metadata"] == {"n": "w"}
    assert await ids(served, "metadata[n]=w") == [completion_id]
    for body, param in (
        ({"metadata": 5}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {f"k{n}": "x" for n in range(17)}}, "metadata"),
        ({"metadata": None, "model": "x"}, "model"),
    ):
        refused = await served.client.post(f"{URL}/{completion_id}", body)
        assert (refused.status, refused.error["param"]) == (400, param)
    gone = await served.client.request("DELETE", f"{URL}/{completion_id}")
    assert gone.json() == {
        "id": completion_id,
        "object": "chat.completion.deleted",
        "deleted": True,
    }
    assert (await served.client.get(f"{URL}/{completion_id}")).status == 404


async def test_its_messages_are_those_that_were_sent(served: Gateway) -> None:
    parts = [{"type": "text", "text": "hi \0"}]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    completion_id = (await ask(served, messages=messages)).json()["id"]
    listed = (await served.client.get(f"{URL}/{completion_id}/messages")).json()["data"]
    assert [(m["role"], m["content"], m["content_parts"]) for m in listed] == [
        ("system", "be brief", None),
        ("user", None, parts),
    ]
    assert len({ChatCompletionStoreMessage.construct(**m).id for m in listed}) == 2
    last = (await served.client.get(f"{URL}/{completion_id}/messages?order=desc&limit=1")).json()
    assert (last["data"], last["has_more"]) == ([listed[1]], True)


async def test_fault_23_a_strangers_completion_is_404_on_every_verb(served: Gateway) -> None:
    completion_id = (await ask(served)).json()["id"]
    other = await asyncio.to_thread(stranger)
    assert (await other.get(f"{URL}/{completion_id}")).status == 404
    assert (await other.get(f"{URL}/{completion_id}/messages")).status == 404
    assert (await other.post(f"{URL}/{completion_id}", {"metadata": None})).status == 404
    assert (await other.request("DELETE", f"{URL}/{completion_id}")).status == 404
    assert (await other.get(f"{URL}?after={completion_id}")).status == 404
    assert (await other.get(URL)).json()["data"] == []
    # And a response is no completion.
    response = await served.client.post("/v1/responses", {"model": "fake", "input": "x"})
    assert (await served.client.get(f"{URL}/{response.json()['id']}")).status == 404
    assert (await served.client.get(f"/v1/responses/{completion_id}")).status == 404


async def test_they_expire(served: Gateway, settings: Any, tmp_path: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(storage_dir=tmp_path)
    completion_id = (await ask(served)).json()["id"]
    await StoredCompletion.objects.aupdate(expires_at=timezone.now() - timedelta(seconds=1))
    assert (await served.client.get(f"{URL}/{completion_id}")).status == 404
    assert await asyncio.to_thread(remove_expired) == 1


async def test_what_can_not_be_kept_is_an_error(
    served: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("inference.api.chat.store_completion", full)
    assert (await ask(served)).status == 500
    events = (await ask(served, stream=True)).events
    assert events[-1]["error"]["code"] == "internal_error"


async def test_without_room_nothing_is_made(served: Gateway, settings: Any) -> None:
    await ask(served)
    settings.QUIRE = settings.QUIRE.replace(tenant_quotas={"stored_chars": 10})
    response = {"model": "fake", "input": "x"}
    for reply in (await ask(served), await served.client.post("/v1/responses", response)):
        assert (reply.status, reply.error["code"]) == (413, "storage_full")
    assert (await ask(served, store=False)).status == 200
    retained_response = await served.client.post("/v1/responses", response | {"store": False})
    assert retained_response.status == 200
    assert len(await served.usage()) == 3


async def test_store_is_refused_where_nothing_is_kept(served: Gateway) -> None:
    body = {"model": "fake", "prompt": "x", "store": True}
    refused = await served.client.post("/v1/completions", body)
    assert (refused.status, refused.error["param"]) == (400, "store")
    messages = [[{"role": "user", "content": "x"}]]
    body = {"model": "fake", "messages": messages, "store": True}
    refused = await served.client.post(f"{URL}/batch", body)
    assert (refused.status, refused.error["param"]) == (400, "store")
