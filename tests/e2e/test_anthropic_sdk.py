"""The `anthropic` SDK, unmodified, against the running product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.product import Product

if TYPE_CHECKING:
    import anthropic

ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
#: The SDK's own methods don't know the field any more; the API does.
GREEDY = {"temperature": 0}
TOOL: Any = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
        "required": ["city"],
    },
}


@pytest.fixture
def client(product: Product) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(
        base_url=product.url, api_key=product.api_key, max_retries=0, timeout=60
    ) as client:
        yield client


def test_a_message(client: anthropic.Anthropic, product: Product) -> None:
    message = client.messages.create(
        model=product.model, max_tokens=100, messages=ASK, extra_body=GREEDY, system="Be brief."
    )
    assert "Paris" in message.content[0].text
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 0
    assert message._request_id


def test_a_streamed_message_is_the_whole_one(client: anthropic.Anthropic, product: Product) -> None:
    full_response = client.messages.create(
        model=product.model, max_tokens=100, messages=ASK, extra_body=GREEDY
    )
    with client.messages.stream(
        model=product.model, max_tokens=100, messages=ASK, extra_body=GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == full_response.content[0].text
    assert final.usage.output_tokens == full_response.usage.output_tokens
    assert final.stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_taken(
    client: anthropic.Anthropic, product: Product, stream: bool
) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
    options: dict[str, Any] = {
        "model": product.model,
        "max_tokens": 200,
        "extra_body": GREEDY,
        "tools": [TOOL],
    }
    choice = {"type": "tool", "name": "get_weather"}
    if stream:
        with client.messages.stream(messages=messages, tool_choice=choice, **options) as events:
            called = events.get_final_message()
    else:
        called = client.messages.create(messages=messages, tool_choice=choice, **options)
    assert called.stop_reason == "tool_use"
    (use,) = [block for block in called.content if block.type == "tool_use"]
    assert (use.name, list(use.input)) == ("get_weather", ["city"])
    messages += [
        {"role": "assistant", "content": called.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "Sun, 20 C."}],
        },
    ]
    answer = client.messages.create(messages=messages, **options)
    assert answer.stop_reason == "end_turn"
    assert answer.content[0].type == "text"


def test_tokens_are_counted(client: anthropic.Anthropic, product: Product) -> None:
    counted = client.messages.count_tokens(model=product.model, messages=ASK)
    usage = client.messages.create(model=product.model, max_tokens=1, messages=ASK).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


async def test_the_async_client_streams(product: Product) -> None:
    import anthropic

    async with (
        anthropic.AsyncAnthropic(base_url=product.url, api_key=product.api_key) as client,
        client.messages.stream(
            model=product.model, max_tokens=50, messages=ASK, extra_body=GREEDY
        ) as stream,
    ):
        assert "Paris" in "".join([text async for text in stream.text_stream])


def test_errors_are_the_sdks(client: anthropic.Anthropic, product: Product) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="nobody", max_tokens=5, messages=ASK)
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model=product.model, max_tokens=0, messages=ASK)
    stranger = anthropic.Anthropic(base_url=product.url, api_key="sk-wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model=product.model, max_tokens=5, messages=ASK)
