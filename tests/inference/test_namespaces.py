"""Tools in namespaces, in the Responses API: the model sees one name, clients two."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.text.tokenizer import Tokenizer
from inference.api.responses.conversion import Messages
from inference.api.responses.output_items import DeliveredItemFilter
from tests.inference.conftest import Gateway
from tests.inference.scripted import says

URL = "/v1/responses"
APP = {"type": "object", "properties": {"app": {"type": "string"}}}
COMPUTER = {
    "type": "namespace",
    "name": "computer",
    "description": "Controls the computer.",
    "tools": [
        {"type": "function", "name": "state", "description": "Of an app.", "parameters": APP},
        {"type": "custom", "name": "run"},
    ],
}
PHONE = {"type": "namespace", "name": "phone", "tools": [COMPUTER["tools"][0]]}  # type: ignore[index]
CALL = '<tool_call>\n{"name": "computer__state", "arguments": {"app": "Clock"}}\n</tool_call>'
TYPED = '<tool_call>\n{"name": "computer__run", "arguments": {"input": "1+1"}}\n</tool_call>'


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "input": "?", "tools": [COMPUTER, PHONE], **fields}


async def test_a_call_has_both_names_and_goes_back(gateway: Gateway, tokenizer: Tokenizer) -> None:
    replica = gateway.scripted(says(tokenizer, CALL))
    async with gateway.serving(replica):
        payload = (await gateway.client.post(URL, body())).json()
        stream = await gateway.client.post(URL, body(stream=True))
        (call,) = Response.model_validate(payload).output
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "3 pm"}
        chained = body(input=[output], previous_response_id=payload["id"])
        history = body(input=[{"role": "user", "content": "?"}, payload["output"][0], output])
        for request_body in (chained, history):
            assert (await gateway.client.post(URL, request_body)).status == 200
    assert (call.type, call.namespace, call.name) == ("function_call", "computer", "state")
    assert json.loads(call.arguments) == {"app": "Clock"}
    events: list[Any] = [
        TypeAdapter(ResponseStreamEvent).validate_python(event) for event in stream.events
    ]
    items = [e.item for e in events if e.type.startswith("response.output_item.")]
    assert [(item.namespace, item.name) for item in items] == [("computer", "state")] * 2
    prompts = [
        tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        for request in replica.received
    ]
    assert all("computer__state" in prompt for prompt in prompts)
    assert "phone__state" in prompts[0]
    assert "Controls the computer.\\nOf an app." in prompts[0]
    assert prompts[2] == prompts[3]


async def test_a_custom_tool_has_a_namespace_too(gateway: Gateway, tokenizer: Tokenizer) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, TYPED))):
        payload = (await gateway.client.post(URL, body())).json()
    (call,) = Response.model_validate(payload).output
    assert (call.type, call.namespace, call.name) == ("custom_tool_call", "computer", "run")
    assert call.input == "1+1"
    assert payload["tools"] == [COMPUTER, {"description": "", **PHONE}]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "computer__state"},
        {"type": "function", "name": "state", "namespace": "computer"},
        {"type": "custom", "name": "run"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "namespace", "name": "computer"}],
        },
    ],
)
async def test_a_choice_may_name_one_of_them(
    choice: dict[str, Any], gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, CALL))
    async with gateway.serving(replica):
        assert (await gateway.client.post(URL, body(tool_choice=choice))).status == 200
    grammar = str(replica.received[0].sampling.structured_outputs)
    assert "computer__" in grammar
    assert "phone__" not in grammar


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{**COMPUTER, "tools": []}]}, "tools[0].tools", "needs tools"),
        ({"tools": [{**COMPUTER, "name": None}]}, "tools[0].name", "needs a name"),
        ({"tools": [{**COMPUTER, "tools": [PHONE]}]}, "tools[0].tools[0].type", "not supported"),
        (
            {"tools": [PHONE, {**COMPUTER, "tools": [{"type": "function"}]}]},
            "tools[1].tools[0].name",
            "needs a name",
        ),
        (
            {"tools": [PHONE, {**COMPUTER, "name": "a b"}]},
            "tools[1].tools[0].name",
            "letters, digits",
        ),
        ({"tools": [PHONE, PHONE]}, "tools", "same name"),
        (
            {"tool_choice": {"type": "function", "name": "state"}},
            "tool_choice",
            "computer__state or phone__state",
        ),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "not found in tools"),
    ],
)
async def test_what_cant_be_meant_is_refused_by_its_field(
    fields: dict[str, Any], param: str, words: str, served: Gateway
) -> None:
    reply = await served.client.post(URL, body(**fields))
    assert reply.status == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_the_model_reads_its_calls_by_the_names_that_it_said() -> None:
    messages = Messages()
    messages.add_all(
        [
            {"type": "function_call", "call_id": "a", "namespace": "computer", "name": "state",
             "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "b", "name": "run", "input": "1"},
        ]
    )  # fmt: skip
    first, second = messages.messages[0]["tool_calls"]
    assert first["function"]["name"] == "computer__state"
    assert second["custom"]["name"] == "run"


def test_a_call_that_was_told_is_passed_over_by_the_name_that_the_model_says() -> None:
    item = {"type": "function_call", "namespace": "computer", "name": "state", "arguments": "{"}
    assert DeliveredItemFilter([item])._delivered[0] == ("call", "computer__state")
