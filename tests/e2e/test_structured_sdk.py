"""Forms, tools and batches against the running product, with the real `openai` SDK."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from pydantic import BaseModel, Field

from tests.e2e.product import Product

ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


class Location(BaseModel):
    """What the model must fill in."""

    kind: Literal["city", "river"]
    people: int = Field(ge=0, le=999)
    tags: list[Literal["a", "b"]] = Field(max_length=2)


class GetWeather(BaseModel):
    """The weather of a place."""

    unit: Literal["C", "F"]
    days: int = Field(ge=1, le=9)


class Walk(BaseModel):
    """Where to go, in so many steps that their stream can't come in one piece."""

    steps: list[Literal["north", "south"]] = Field(min_length=60, max_length=60)


TOOLS: list[Any] = [
    openai.pydantic_function_tool(GetWeather, name="get_weather"),
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}},
]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_parse_fills_a_pydantic_model(
    client: openai.OpenAI, product: Product, temperature: float
) -> None:
    answer = client.chat.completions.parse(
        model=product.model,
        messages=ASK,
        response_format=Location,
        temperature=temperature,
        seed=1,
        max_completion_tokens=200,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Location)


def test_parse_reads_required_calls(client: openai.OpenAI, product: Product) -> None:
    answer = client.chat.completions.parse(
        model=product.model,
        messages=ASK,
        tools=TOOLS[:1],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=200,
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_a_named_function_is_called(client: openai.OpenAI, product: Product) -> None:
    answer = client.chat.completions.create(
        model=product.model,
        messages=ASK,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        parallel_tool_calls=False,
        temperature=1.5,
        max_completion_tokens=200,
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert call.function.name == "get_weather"
    GetWeather.model_validate_json(call.function.arguments)
    assert answer.choices[0].finish_reason == "stop"


def streamed_call(client: openai.OpenAI, settings: dict[str, Any]) -> tuple[list[str], list[Any]]:
    """The pieces of a call's arguments as they come, and the calls when all is there."""
    chunks = []
    with client.chat.completions.stream(**settings) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                chunks.append(event.arguments_delta)
                assert event.arguments == "".join(chunks)
        return chunks, stream.get_final_completion().choices[0].message.tool_calls or []


def test_a_stream_of_calls_adds_up(client: openai.OpenAI, product: Product) -> None:
    settings: dict[str, Any] = {
        "model": product.model,
        "messages": ASK,
        "tools": [openai.pydantic_function_tool(Walk, name="walk")],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_completion_tokens": 800,
    }
    full_tool_calls = client.chat.completions.create(**settings).choices[0].message.tool_calls or []
    # A gateway that lags behind hands on what has come meanwhile in one piece.
    chunks, final = streamed_call(client, settings)
    assert len(chunks) > 1
    assert isinstance(full_tool_calls[0], ChatCompletionMessageFunctionToolCall)
    assert "".join(chunks) == final[0].function.arguments == full_tool_calls[0].function.arguments


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"guided_regex": "[ab]"}, {"a", "b"}),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, {"x", "y"}),
    ],
)
def test_vllms_forms(
    client: openai.OpenAI, product: Product, fields: dict[str, Any], allowed: set[str]
) -> None:
    chat = client.chat.completions.create(
        model=product.model, messages=ASK, extra_body=fields, max_completion_tokens=20
    )
    assert chat.choices[0].message.content in allowed
    completion = client.completions.create(
        model=product.model, prompt="Hm", extra_body=fields, max_tokens=20
    )
    assert completion.choices[0].text in allowed


def test_a_schema_that_cant_be_kept_names_the_field(
    client: openai.OpenAI, product: Product
) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model=product.model, messages=ASK, response_format=form)
    assert str(refusal.value.param).startswith("response_format")


def test_fault_39_a_reference_to_itself_is_refused(client: openai.OpenAI, product: Product) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(
            model=product.model, messages=ASK, tools=[tool], tool_choice="required"
        )
    assert refusal.value.param == "tools"


def test_beams_are_returned_from_the_best(client: openai.OpenAI, product: Product) -> None:
    settings: dict[str, Any] = {
        "model": product.model,
        "messages": ASK,
        "max_completion_tokens": 12,
    }
    beams = {"use_beam_search": True, "best_of": 4, "length_penalty": 0.0}
    answer = client.chat.completions.create(
        **settings, n=3, temperature=0, logprobs=True, extra_body=beams
    )
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    scores = []
    for choice in answer.choices:
        assert choice.logprobs is not None
        scores.append(sum(token.logprob for token in choice.logprobs.content or []))
    assert scores == sorted(scores, reverse=True)
    greedy = client.chat.completions.create(**settings, temperature=0, logprobs=True)
    assert greedy.choices[0].logprobs is not None
    likelihood = sum(token.logprob for token in greedy.choices[0].logprobs.content or [])
    assert scores[0] >= likelihood - 1e-3


def test_a_batch_answers_each_conversation(product: Product) -> None:
    body = {"model": product.model, "messages": [ASK, ASK], "temperature": 0, "max_tokens": 20}
    reply = httpx.post(
        f"{product.base_url}/chat/completions/batch",
        json=body,
        headers={"Authorization": f"Bearer {product.api_key}"},
        timeout=60,
    )
    texts = [choice["message"]["content"] for choice in reply.json()["choices"]]
    assert len(texts) == 2
    assert texts[0] == texts[1] != ""
    assert json.dumps(texts[0])
