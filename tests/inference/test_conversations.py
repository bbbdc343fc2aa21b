"""`/v1/conversations`, the responses that go on with them, and `/v1/responses/compact`."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from openai.types.conversations import Conversation, ConversationItemList
from openai.types.responses import CompactedResponse

from engine.text.tokenizer import Tokenizer
from inference import work as queue
from inference.api.responses.runner import run_response
from inference.engine_client.client import get_engine_client
from storage import ownership
from storage.actions import remove_expired
from storage.models import ConversationItem, ItemConversation
from tenants.models import AuditEntry
from tests.inference.conftest import Gateway
from tests.inference.scripted import byte_by_byte, says
from tests.inference.strangers import stranger
from tests.inference.test_resuming import events, texts_by_kind

URL = "/v1/conversations"
HELLO = {"type": "message", "role": "user", "content": "hello"}


async def begin(gateway: Gateway, **body: Any) -> dict[str, Any]:
    reply = await gateway.client.post(URL, body)
    assert reply.status == 200, reply.body
    return reply.json()


async def items_of(gateway: Gateway, conversation: dict[str, Any], query: str = "") -> list[Any]:
    reply = await gateway.client.get(f"{URL}/{conversation['id']}/items?order=asc{query}")
    if reply.json()["data"]:
        ConversationItemList.model_validate(reply.json())
    return reply.json()["data"]


async def test_a_conversation_is_begun_read_changed_and_forgotten(gateway: Gateway) -> None:
    client = gateway.client
    conversation = await begin(gateway, items=[HELLO], metadata={"a": "b"})
    assert Conversation.model_validate(conversation).metadata == {"a": "b"}
    path = f"{URL}/{conversation['id']}"
    assert (await client.get(path)).json() == conversation
    changed = (await client.post(path, {"metadata": {"c": "d"}})).json()
    assert changed == conversation | {"metadata": {"c": "d"}}
    added = await client.post(f"{path}/items", {"items": [HELLO | {"content": "more"}]})
    (item,) = added.json()["data"]
    assert (await client.get(f"{path}/items/{item['id']}")).json() == item
    items = await items_of(gateway, conversation)
    assert [item["content"][0]["text"] for item in items] == ["hello", "more"]
    assert len(await items_of(gateway, conversation, "&limit=1")) == 1
    assert await items_of(gateway, conversation, f"&after={items[0]['id']}") == items[1:]
    assert (await client.request("DELETE", f"{path}/items/{item['id']}")).json() == changed
    assert len(await items_of(gateway, conversation)) == 1
    gone = (await client.request("DELETE", path)).json()
    assert gone == {"id": conversation["id"], "object": "conversation.deleted", "deleted": True}
    assert (await client.get(path)).status == 404
    remaining = await asyncio.to_thread(
        lambda: (
            ItemConversation.objects.count() + ConversationItem.objects.count(),
            list(AuditEntry.objects.order_by("-pk").values_list("action", flat=True)[:4]),
        )
    )
    names = ("delete", "delete_item", "update", "create")
    assert remaining == (0, [f"item_conversation.{name}" for name in names])


@pytest.mark.parametrize("store", [False, True])
async def test_a_stream_is_gone_on_with_after_its_turn_and_others_have_joined(
    gateway: Gateway, tokenizer: Tokenizer, store: bool
) -> None:
    """The prompt stays what it was, and the turn is there once."""
    conversation = await begin(gateway, items=[HELLO])
    body = {"model": "fake", "conversation": conversation["id"], "store": store, "input": "one"}
    async with gateway.serving(gateway.scripted(says(tokenizer, "the quick brown fox"))) as replica:

        async def stream(after: str | None = None) -> list[tuple[str, str]]:
            headers = {} if after is None else {"last-event-id": after}
            sent = body | {"stream": True}
            exchange = gateway.client.open("POST", "/v1/responses", sent, headers=headers)
            reply = await asyncio.wait_for(exchange.reply(), 60)
            await get_engine_client().journal.save()
            assert reply.status == 200, reply.body
            return events(reply)

        full_stream = await stream()
        again = {"items": [HELLO | {"content": "meanwhile"}]}
        assert (await gateway.client.post(f"{URL}/{conversation['id']}/items", again)).status == 200
        initial_items = await items_of(gateway, conversation)
        assert len(initial_items) == 4
        for index in (0, len(full_stream) // 2, len(full_stream) - 2):
            rest = await stream(full_stream[index][0])
            assert texts_by_kind([*full_stream[: index + 1], *rest]) == texts_by_kind(full_stream)
        assert len(replica.received) == 1
    assert await items_of(gateway, conversation) == initial_items


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [False, True])
async def test_responses_go_on_with_it_and_add_to_it(
    gateway: Gateway, tokenizer: Tokenizer, stream: bool, store: bool
) -> None:
    conversation = await begin(gateway, items=[HELLO])
    ask = {"model": "fake", "conversation": conversation["id"], "store": store}
    async with gateway.serving(gateway.scripted(says(tokenizer, "fox"))) as replica:
        reply = await gateway.client.post("/v1/responses", ask | {"input": "one", "stream": stream})
        assert reply.status == 200
        body = reply.events[-1]["response"] if stream else reply.json()
        second = ask | {"input": "two", "conversation": {"id": conversation["id"]}}
        assert (await gateway.client.post("/v1/responses", second)).status == 200
    assert body["conversation"] == {"id": conversation["id"]}
    prompt = tokenizer.decode(replica.received[-1].prompt_token_ids, False)
    indexes = [prompt.index(text) for text in ("hello", "one", "fox", "two")]
    assert indexes == sorted(indexes)
    items = await items_of(gateway, conversation)
    texts = [item["content"][0]["text"] for item in items]
    assert texts == ["hello", "one", "fox", "two", "fox"]
    assert items[2]["id"] == body["output"][0]["id"]


async def test_a_background_response_adds_its_turn_once(
    gateway: Gateway, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "send_job", lambda kind, public_id: None)
    conversation = await begin(gateway)
    ask = {"model": "fake", "input": "one", "conversation": conversation["id"], "background": True}
    async with gateway.serving(gateway.scripted(says(tokenizer, "fox"))):
        body = (await gateway.client.post("/v1/responses", ask)).json()
        assert await items_of(gateway, conversation) == []
        await run_response(body["id"], "worker")
        await run_response(body["id"], "another")
    items = await items_of(gateway, conversation)
    assert [item["content"][0]["text"] for item in items] == ["one", "fox"]


async def test_nobody_else_sees_it(served: Gateway) -> None:
    conversation = await begin(served, items=[HELLO])
    (item,) = await items_of(served, conversation)
    other = await asyncio.to_thread(stranger)
    path = f"{URL}/{conversation['id']}"
    for method, where, body in (
        ("GET", path, None),
        ("POST", path, {"metadata": {}}),
        ("DELETE", path, None),
        ("GET", f"{path}/items", None),
        ("POST", f"{path}/items", {"items": [HELLO]}),
        ("GET", f"{path}/items/{item['id']}", None),
        ("DELETE", f"{path}/items/{item['id']}", None),
    ):
        assert (await other.request(method, where, body)).status == 404, (method, where)
    mine = await served.client.post(
        "/v1/responses", {"model": "fake", "input": "x", "conversation": "conv_" + "0" * 32}
    )
    assert (mine.status, mine.error["param"]) == (404, "conversation")
    assert len(await items_of(served, conversation)) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [HELLO] * 21}, "items"),
        ({"items": [{"type": "unheard_of"}]}, "items[0].type"),
        ({"items": [{"type": "message", "role": "user"}]}, "items[0].content"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"odd": 1}, "odd"),
    ],
)
async def test_what_is_wrong_is_named(gateway: Gateway, body: Any, param: str) -> None:
    reply = await gateway.client.post(URL, body)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_one_place_to_go_on_from(served: Gateway) -> None:
    both = {"conversation": "conv_1", "previous_response_id": "resp_1"}
    reply = await served.client.post("/v1/responses", {"model": "fake", "input": "x"} | both)
    assert (reply.status, reply.error["param"]) == (400, "conversation")


async def test_a_tenants_room_holds_for_conversations_too(gateway: Gateway, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(tenant_quotas={"stored_chars": 500})
    await begin(gateway, items=[HELLO | {"content": "x" * 600}])
    ownership.forget()
    reply = await gateway.client.post(URL, {})
    assert (reply.status, reply.error["code"]) == (413, "storage_full")


async def test_its_end_comes_with_its_last_change(gateway: Gateway) -> None:
    conversation = await begin(gateway, items=[HELLO])
    past = timezone.now() - timedelta(seconds=1)
    rows = ItemConversation.objects
    await asyncio.to_thread(rows.update, expires_at=past)
    assert (await gateway.client.get(f"{URL}/{conversation['id']}")).status == 404
    await asyncio.to_thread(remove_expired)
    assert await asyncio.to_thread(ConversationItem.objects.count) == 0


async def test_a_compaction_stands_for_all_but_the_users_words(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    parts = [{"type": "input_text", "text": "And red."}]
    spoken = [
        HELLO | {"content": "My cat is called Mo."},
        {"role": "assistant", "content": "A fine name."},
        HELLO | {"content": parts},
    ]
    replica = gateway.scripted(byte_by_byte(tokenizer, "The cat is Mo."))
    async with gateway.serving(replica):
        reply = await gateway.client.post(
            "/v1/responses/compact", {"model": "fake", "input": spoken}
        )
        assert reply.status == 200, reply.body
        *asked, item = output = reply.json()["output"]
        more = [*output, HELLO | {"content": "What is it called?"}]
        answer = await gateway.client.post("/v1/responses", {"model": "fake", "input": more})
        assert answer.status == 200
        conversation = await begin(gateway, items=output)
        again = {"model": "fake", "input": "?", "conversation": conversation["id"]}
        assert (await gateway.client.post("/v1/responses", again)).status == 200
        twice = await gateway.client.post("/v1/responses/compact", {"model": "fake", "input": more})
        long = [HELLO | {"content": f"{index} {'a' * 600}"} for index in range(9)]
        cut = await gateway.client.post("/v1/responses/compact", {"model": "fake", "input": long})
    assert [item["content"][0]["text"] for item in asked] == ["My cat is called Mo.", "And red."]
    assert {(item["type"], item["role"]) for item in asked} == {("message", "user")}
    kinds = [event.type for event in CompactedResponse.construct(**reply.json()).output]
    assert kinds == ["message", "message", "compaction"]
    assert len(twice.json()["output"]) == 4
    *complete_items, _ = cut.json()["output"]
    assert 0 < len(complete_items) < 9
    assert complete_items[-1]["content"][0]["text"].startswith("8 ")
    assert "The cat" not in item["encrypted_content"]
    prompts = [tokenizer.decode(request.prompt_token_ids, False) for request in replica.received]
    assert "A fine name." in prompts[0]
    assert all("The cat is Mo." in prompt and "And red." in prompt for prompt in prompts[1:3])
    assert "A fine name." not in prompts[1]


async def test_a_compaction_is_its_tenants(served: Gateway) -> None:
    reply = await served.client.post("/v1/responses/compact", {"model": "fake", "input": "hi"})
    *_, item = reply.json()["output"]
    other = await asyncio.to_thread(stranger)
    for client, content in (
        (other, item["encrypted_content"]),
        (served.client, item["encrypted_content"][:-8] + "AAAAAAA="),
        (served.client, "summary"),
        (served.client, 5),
    ):
        sent = [item | {"encrypted_content": content}, HELLO]
        response = await client.post("/v1/responses", {"model": "fake", "input": sent})
        assert response.status == 400
        assert response.error["param"] == "input[0].encrypted_content"


async def test_nothing_can_not_be_made_short(served: Gateway) -> None:
    reply = await served.client.post("/v1/responses/compact", {"model": "fake", "input": []})
    assert (reply.status, reply.error["param"]) == (400, "input")
