"""What the SDKs keep on the server, and custom tools, against the running product."""

from __future__ import annotations

import re
import time
from typing import Any

import openai
import pytest

from tests.e2e.product import Product

QUESTION = "What is the capital of France?"
SHOUT = {"name": "shout", "description": "Says a word aloud."}
WORD = {"syntax": "regex", "definition": "[A-Z]{3,9}"}


def test_a_conversation(client: openai.OpenAI, product: Product) -> None:
    question: Any = {"type": "message", "role": "user", "content": "Hello!"}
    conversation = client.conversations.create(items=[question], metadata={"kind": "e2e"})
    answer = client.responses.create(
        model=product.model, conversation=conversation.id, input=QUESTION, temperature=0
    )
    assert "Paris" in answer.output_text
    client.conversations.items.create(conversation.id, items=[question])
    items: list[Any] = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "user", "assistant", "user"]
    first: Any = client.conversations.items.retrieve(items[0].id, conversation_id=conversation.id)
    assert first.content[0].text == "Hello!"
    client.conversations.items.delete(items[3].id, conversation_id=conversation.id)
    assert client.conversations.update(conversation.id, metadata={"a": "b"}).metadata == {"a": "b"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_an_upload_in_parts(client: openai.OpenAI) -> None:
    data = b"0123456789" * 10
    upload = client.uploads.upload_file_chunked(
        file=data,
        filename="in.jsonl",
        bytes=len(data),
        mime_type="text/jsonl",
        purpose="batch",
        part_size=32,
    )
    assert upload.status == "completed"
    assert upload.file is not None
    assert client.files.content(upload.file.id).read() == data
    client.files.delete(upload.file.id)


def test_a_conversation_made_short(client: openai.OpenAI, product: Product) -> None:
    turns: Any = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "Paris."},
    ]
    short = client.responses.compact(model=product.model, input=turns)
    assert [item.type for item in short.output] == ["message", "compaction"]
    more: Any = [*short.output, {"role": "user", "content": "And of Italy?"}]
    answer = client.responses.create(model=product.model, input=more, max_output_tokens=10)
    assert answer.usage is not None
    assert answer.usage.input_tokens > 20


def test_custom_tools(client: openai.OpenAI, product: Product) -> None:
    form = {"type": "grammar", "grammar": WORD}
    chat: Any = client.chat.completions.create(
        model=product.model,
        messages=[{"role": "user", "content": "Shout hello!"}],
        tools=[{"type": "custom", "custom": {**SHOUT, "format": form}}],  # type: ignore[typeddict-item]
        tool_choice={"type": "custom", "custom": {"name": "shout"}},
    )
    (call,) = chat.choices[0].message.tool_calls
    response: Any = client.responses.create(
        model=product.model,
        input="Shout hello!",
        tools=[{"type": "custom", **SHOUT, "format": {"type": "grammar", **WORD}}],  # type: ignore[typeddict-item, list-item]
        tool_choice={"type": "custom", "name": "shout"},
    )
    item = response.output[-1]
    assert (call.type, item.type) == ("custom", "custom_tool_call")
    for name, text in ((call.custom.name, call.custom.input), (item.name, item.input)):
        assert name == "shout"
        assert re.fullmatch(WORD["definition"], text)


def test_a_batch_of_messages(product: Product) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=product.url, api_key=product.api_key, max_retries=0)
    params: Any = {
        "model": product.model,
        "max_tokens": 50,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
    }
    batches = client.messages.batches
    with client:
        batch = batches.create(
            requests=[
                {"custom_id": "right", "params": params},
                {"custom_id": "wrong", "params": params | {"model": "none"}},
            ]
        )
        deadline = time.monotonic() + 60
        while batch.processing_status != "ended" and time.monotonic() < deadline:
            time.sleep(0.2)
            batch = batches.retrieve(batch.id)
        assert (batch.request_counts.succeeded, batch.request_counts.errored) == (1, 1)
        results: dict[str, Any] = {
            line.custom_id: line.result for line in batches.results(batch.id)
        }
        assert "Paris" in results["right"].message.content[0].text
        assert results["wrong"].error.error.type == "not_found_error"
        assert [listed.id for listed in batches.list(limit=1)][:1] == [batch.id]
        assert batches.delete(batch.id).type == "message_batch_deleted"
