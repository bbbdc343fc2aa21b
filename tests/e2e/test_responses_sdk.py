"""The `openai` SDK's Responses, files and batches against the running product."""

from __future__ import annotations

import json
import time
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.product import Product

QUESTION = "What is the capital of France?"


class Capital(BaseModel):
    """A country and its capital. (Words are given: the demo model isn't trained on JSON.)"""

    country: Literal["France", "Italy"]
    capital: Literal["Paris", "Rome"]


def test_a_response_and_the_next_that_remembers_it(client: openai.OpenAI, product: Product) -> None:
    first = client.responses.create(model=product.model, input=QUESTION, temperature=0)
    assert "Paris" in first.output_text
    assert first.usage is not None
    assert first.usage.output_tokens > 0
    second = client.responses.create(
        model=product.model, input="Thank you.", previous_response_id=first.id, temperature=0
    )
    assert second.previous_response_id == first.id
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    items = client.responses.input_items.list(first.id)
    assert [item.content[0].text for item in items] == [QUESTION]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_the_streaming_helper_follows_the_events(client: openai.OpenAI, product: Product) -> None:
    with client.responses.stream(model=product.model, input=QUESTION, temperature=0) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        final = stream.get_final_response()
    assert final.output_text == text
    assert "Paris" in text


async def test_the_async_client_streams(product: Product) -> None:
    async with openai.AsyncOpenAI(
        base_url=product.base_url, api_key=product.api_key, max_retries=0
    ) as client:
        stream = await client.responses.create(
            model=product.model, input=QUESTION, stream=True, temperature=0
        )
        kinds = [event.type async for event in stream]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


def test_answers_are_parsed_into_models(client: openai.OpenAI, product: Product) -> None:
    chat = client.chat.completions.parse(
        model=product.model,
        messages=[{"role": "user", "content": QUESTION}],
        response_format=Capital,
        max_tokens=200,
    )
    assert isinstance(chat.choices[0].message.parsed, Capital)
    response = client.responses.parse(
        model=product.model, input=QUESTION, text_format=Capital, max_output_tokens=200
    )
    assert isinstance(response.output_parsed, Capital)


def test_a_background_response_is_made_by_the_worker(
    client: openai.OpenAI, product: Product
) -> None:
    response = client.responses.create(
        model=product.model, input=QUESTION, background=True, temperature=0
    )
    assert response.status == "queued"
    deadline = time.monotonic() + 60
    while response.status in ("queued", "in_progress") and time.monotonic() < deadline:
        time.sleep(0.2)
        response = client.responses.retrieve(response.id)
    assert (response.status, "Paris" in response.output_text) == ("completed", True)


def test_a_background_stream_is_left_and_taken_up_again(
    client: openai.OpenAI, product: Product
) -> None:
    stream = client.responses.create(
        model=product.model, input=QUESTION, background=True, stream=True, temperature=0
    )
    events = [next(iter(stream)) for _ in range(4)]
    stream.close()
    response_id = events[0].response.id
    last = events[-1].sequence_number
    events += list(client.responses.retrieve(response_id, stream=True, starting_after=last))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == client.responses.retrieve(response_id).output_text
    assert "Paris" in text


def test_chat_completions_are_kept_on_request(client: openai.OpenAI, product: Product) -> None:
    stored = client.chat.completions
    chunk = stored.create(
        model=product.model,
        messages=[{"role": "user", "content": QUESTION}],
        metadata={"kind": "e2e"},
        max_tokens=5,
        store=True,
    )
    assert stored.retrieve(chunk.id).choices == chunk.choices
    assert [item.id for item in stored.list(metadata={"kind": "e2e"})] == [chunk.id]
    assert [message.content for message in stored.messages.list(chunk.id)] == [QUESTION]
    assert stored.update(chunk.id, metadata={"kind": "other"}).metadata == {"kind": "other"}
    assert list(stored.list(metadata={"kind": "e2e"})) == []
    assert stored.delete(chunk.id).deleted
    with pytest.raises(openai.NotFoundError):
        stored.retrieve(chunk.id)


def test_a_batch_is_run_by_the_worker(client: openai.OpenAI, product: Product) -> None:
    questions = {"fr": QUESTION, "it": "What is the capital of Italy?"}
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": product.model,
                "messages": [{"role": "user", "content": text}],
                "temperature": 0,
            },
        }
        for name, text in questions.items()
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    deadline = time.monotonic() + 60
    while batch.status not in ("completed", "failed") and time.monotonic() < deadline:
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    assert batch.output_file_id is not None
    answers = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    }
    assert "Paris" in answers["fr"]
    assert "Rome" in answers["it"]
