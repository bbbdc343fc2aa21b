"""Requests of a hundred bytes that name thousands of things: the event loop goes through none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from common.files import new_id
from inference import work as queue
from inference.api import files as files
from inference.api.responses import conversation as conversation_module
from inference.api.responses import conversion as chat
from inference.api.responses.conversion import Messages
from inference.chat import job
from storage.models import ConversationItem, ItemConversation, StoredFile, StoredResponse
from tests.inference.conftest import Gateway

MANY = 10_000
ITEM = {"type": "message", "role": "user", "content": "a"}
GATEWAYS_WORK: list[tuple[Any, str]] = [
    (Messages, "add_all"),
    (conversation_module, "expand_compactions"),
    (job, "template_messages"),
    (job, "count_chars"),
    (chat, "parse"),
]


@pytest.fixture
def on_loop(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[bool]]:
    """By function: whether it ran on the event loop, each time it was called."""
    calls: dict[str, list[bool]] = {}

    def watch(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            calls.setdefault(name, []).append(threading.current_thread() is threading.main_thread())
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for index, name in [*GATEWAYS_WORK, (files, "file_object")]:
        watch(index, name)
    return calls


async def a_conversation(gateway: Gateway, items: int) -> dict[str, Any]:
    """By its id, a conversation of so many items."""
    tenant = gateway.rows.tenant
    size = items * len(str(ITEM))
    row = await ItemConversation.objects.acreate(
        public_id=new_id("conv_"), tenant=tenant, size=size, changed_at=tenant.created_at
    )
    conversation_items = (
        ConversationItem(
            conversation=row, public_id=f"msg_{number}", item=ITEM, size=len(str(ITEM))
        )
        for number in range(items)
    )
    await ConversationItem.objects.abulk_create(conversation_items)
    return {"conversation": row.public_id}


async def a_response(gateway: Gateway, items: int) -> dict[str, Any]:
    """By its id, a response to so many items."""
    row = await StoredResponse.objects.acreate(
        public_id=new_id("resp_"),
        tenant=gateway.rows.tenant,
        status="completed",
        request={},
        input_items=[ITEM] * items,
        body={"output": []},
    )
    return {"previous_response_id": row.public_id}


@pytest.mark.parametrize(
    ("path", "make", "more"),
    [
        ("/v1/responses", a_conversation, {"store": False, "max_output_tokens": 1}),
        ("/v1/responses", a_conversation, {"truncation": "auto", "max_output_tokens": 1}),
        ("/v1/responses", a_response, {"background": True}),
        ("/v1/responses/input_tokens", a_conversation, {}),
        ("/v1/responses/input_tokens", a_response, {}),
        ("/v1/responses/render", a_conversation, {}),
        ("/v1/responses/compact", a_response, {}),
    ],
)
async def test_fault_69_items_that_a_small_body_names_are_gone_through_in_threads(
    gateway: Gateway,
    path: str,
    make: Callable[..., Any],
    more: dict[str, Any],
    on_loop: dict[str, list[bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue, "send_job", lambda kind, public_id: None)
    body = {"model": "fake", "input": "b", **more}
    async with gateway.serving(gateway.fake(max_model_len=1 << 20, eos_after=1)):
        large = body | await make(gateway, MANY)
        reply = await gateway.client.post(path, large)
        assert reply.status == 200, reply.body
        assert set(on_loop) >= {"add_all", "expand_compactions", "parse"}
        assert not any(map(any, on_loop.values())), on_loop
        on_loop.clear()
        small = body | await make(gateway, 2)
        assert (await gateway.client.post(path, small)).status == 200
        assert all(map(all, on_loop.values())), "few aren't worth a thread"


async def test_fault_69_thousands_of_files_are_listed_in_a_thread(
    gateway: Gateway, on_loop: dict[str, list[bool]]
) -> None:
    tenant = gateway.rows.tenant
    stored_files = (
        StoredFile(public_id=new_id("file-"), tenant=tenant, filename="a", purpose="batch", size=1)
        for _ in range(MANY)
    )
    await StoredFile.objects.abulk_create(stored_files)
    reply = await gateway.client.get("/v1/files")
    assert len(reply.json()["data"]) == MANY
    assert on_loop == {"file_object": [False] * MANY}
