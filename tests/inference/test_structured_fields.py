"""Fields that say what an output looks like, as they reach the engine, or as they are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.contract.messages import EngineRequest, ErrorInfo, TokenDelta
from engine.contract.structured_outputs import StructuredOutputsParams
from engine.text.tokenizer import Tokenizer
from tests.fakes.fake_replica import Sequence
from tests.inference.conftest import Gateway
from tests.inference.scripted import ScriptedReplica, byte_by_byte, says
from tests.inference.test_chat_tools import CALL, TOOL, assembled
from tests.inference.tokenizer_folder import with_template

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
    "triggers": ["<f>"],
}


def json_schema(**changes: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **changes}}


FIELDS: list[tuple[dict[str, Any], StructuredOutputsParams | None]] = [
    ({"response_format": {"type": "text"}}, None),
    (
        {"response_format": {"type": "json_object"}},
        StructuredOutputsParams(json_object=True),
    ),
    ({"response_format": json_schema()}, StructuredOutputsParams(json=SCHEMA)),
    (
        {"response_format": json_schema(strict=True)},
        StructuredOutputsParams(json=SCHEMA, disable_additional_properties=True),
    ),
    (
        {"response_format": {"type": "structural_tag", **TAG}},
        StructuredOutputsParams(structural_tag=json.dumps(TAG)),
    ),
    ({"structured_outputs": {"regex": "[a-z]+"}}, StructuredOutputsParams(regex="[a-z]+")),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    ),
    (
        {"structured_outputs": {"structural_tag": TAG}},
        StructuredOutputsParams(structural_tag=json.dumps(TAG)),
    ),
    ({"guided_json": SCHEMA}, StructuredOutputsParams(json=SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, StructuredOutputsParams(json=json.dumps(SCHEMA))),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"},
        StructuredOutputsParams(json=SCHEMA, whitespace_pattern="[ ]?"),
    ),
    ({"guided_json_object": True}, StructuredOutputsParams(json_object=True)),
    (
        {"guided_regex": "a|b", "guided_decoding_backend": "auto"},
        StructuredOutputsParams(regex="a|b"),
    ),
    (
        {"guided_regex": "a|b", "guided_decoding_backend": "outlines"},
        StructuredOutputsParams(regex="a|b"),
    ),
    (
        {"guided_regex": "a|b", "guided_decoding_backend": "lm-format-enforcer"},
        StructuredOutputsParams(regex="a|b"),
    ),
    ({"guided_choice": ["yes", "no"]}, StructuredOutputsParams(choice=["yes", "no"])),
    ({"guided_grammar": 'root ::= "x"'}, StructuredOutputsParams(grammar='root ::= "x"')),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": json_schema(name="a b")}, "response_format.json_schema.name"),
    ({"response_format": json_schema(schema="{}")}, "response_format.json_schema.schema"),
    ({"response_format": json_schema(strict=1)}, "response_format.json_schema.strict"),
    ({"response_format": {"type": "structural_tag", "triggers": []}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"backend": "x"}}, "structured_outputs.backend"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "a", "guided_decoding_backend": "other"}, "guided_decoding_backend"),
    ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": json_schema(), "guided_json": {"type": "array"}}, "guided_json"),
]


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_each_field_reaches_the_engine(
    gateway: Gateway, tokenizer: Tokenizer, path: str
) -> None:
    replica = gateway.scripted(says(tokenizer, "x"))
    async with gateway.serving(replica):
        for fields, _ in FIELDS:
            reply = await getattr(gateway.client, path)(**fields)
            assert reply.status == 200, reply.body
    received = [request.sampling.structured_outputs for request in replica.received]
    assert received == [params for _, params in FIELDS]


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_bad_ones_are_refused_by_the_clients_name(served: Gateway, path: str) -> None:
    for fields, param in REFUSED:
        reply = await getattr(served.client, path)(**fields)
        assert (reply.status, reply.error["param"]) == (400, param), reply.body
        assert not param.startswith("guided") or "structured_outputs" not in reply.error["message"]


class RefusingReplica(ScriptedReplica):
    """Says what an engine says of a grammar that can't be compiled."""

    def _advance(self, request: EngineRequest, sequence: Sequence) -> TokenDelta:
        delta = super()._advance(request, sequence)
        sequence.finish_reason = delta.finish_reason = "error"
        delta.error = ErrorInfo(
            message="The json of structured_outputs can't be used: no.",
            status=400,
            error_type="invalid_request_error",
            code="invalid_grammar",
            param="structured_outputs",
        )
        return delta


async def test_the_engines_refusal_names_the_clients_field(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    options = gateway._options()
    replica = RefusingReplica(gateway.redis_url, says(tokenizer, "x"), **options)
    async with gateway.serving(replica):
        reply = await gateway.client.chat(response_format=json_schema())
        assert (reply.status, reply.error["param"]) == (400, "response_format")
        assert "response_format" in reply.error["message"]
        reply = await gateway.client.chat(tools=[TOOL], tool_choice="required")
        assert (reply.status, reply.error["param"]) == (400, "tools")


async def test_required_and_named_calls_become_grammars(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    other = {"type": "function", "function": {"name": "clock"}}
    named = {"type": "function", "function": {"name": "clock"}}
    replica = gateway.scripted(byte_by_byte(tokenizer, CALL))
    async with gateway.serving(replica):
        required = await gateway.client.chat(tools=[TOOL, other], tool_choice="required")
        forced = await gateway.client.chat(tools=[TOOL, other], tool_choice=named)
        stream = await gateway.client.chat(tools=[TOOL, other], tool_choice=named, stream=True)
    grammars = [request.sampling.structured_outputs for request in replica.received]
    assert all(params is not None and params.grammar for params in grammars)
    texts = [params.grammar or "" for params in grammars if params is not None]
    assert "weather" in texts[0]
    assert "clock" in texts[0]
    assert "weather" not in texts[1]
    assert required.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert forced.json()["choices"][0]["finish_reason"] == "stop"  # as OpenAI has it
    assert stream.events[-2]["choices"][0]["finish_reason"] == "stop"
    assert len(assembled(stream.events)[1]) == 1


async def test_enforced_calls_need_no_training(
    gateway: Gateway, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    default_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    text = '[{"name": "weather", "arguments": {"city": "X"}}]'
    replica = gateway.scripted(
        says(tokenizer, text),
        model_path=with_template(gateway.model_folder, tmp_path, default_template),
    )
    async with gateway.serving(replica):
        reply = await gateway.client.chat(tools=[TOOL], tool_choice="required")
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "X"}'}


async def test_bad_tool_choices_are_refused(served: Gateway) -> None:
    unknown = {"type": "function", "function": {"name": "nobody"}}
    for choice in ("always", unknown, {"type": "function"}, {}):
        reply = await served.client.chat(tools=[TOOL], tool_choice=choice)
        assert (reply.status, reply.error["param"]) == (400, "tool_choice")
    for choice in ("auto", "required"):
        reply = await served.client.chat(tool_choice=choice)
        assert (reply.status, reply.error["param"]) == (400, "tool_choice")
    reply = await served.client.chat(tools=[TOOL, TOOL])
    assert (reply.status, reply.error["param"]) == (400, "tools")
    odd = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
    reply = await served.client.chat(tools=[odd])
    assert (reply.status, reply.error["param"]) == (400, "tools[0].function.parameters")
    reply = await served.client.chat(tools=[TOOL], tool_choice="required", guided_regex="a")
    assert (reply.status, reply.error["param"]) == (400, "guided_regex")


async def test_strict_functions_and_json_answers_keep_their_form_while_the_model_chooses(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    replica = gateway.scripted(says(tokenizer, "x"))
    async with gateway.serving(replica):
        await gateway.client.chat(tools=[TOOL])
        await gateway.client.chat(tools=[strict])
        await gateway.client.chat(tools=[TOOL], response_format=json_schema())
        await gateway.client.chat(tools=[TOOL], tool_choice="none", guided_regex="a")
    free, retained_structured_outputs, either, none = (
        request.sampling.structured_outputs for request in replica.received
    )
    assert free is None
    assert retained_structured_outputs is not None
    assert "TEXT" in (retained_structured_outputs.grammar or "")
    assert either is not None
    assert "answer:" in (either.grammar or "")
    assert none == StructuredOutputsParams(regex="a")


async def test_fault_39_tools_that_are_too_deep_or_too_long_are_refused(served: Gateway) -> None:
    deep: dict[str, Any] = {}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "deep", "parameters": deep}}
    reply = await served.client.chat(tools=[tool], tool_choice="required")
    assert reply.status == 400
    long = {"type": "function", "function": {"name": "f", "parameters": {"title": "x" * 140_000}}}
    reply = await served.client.chat(tools=[long], tool_choice="required")
    assert (reply.status, reply.error["param"]) == (400, "tools")


async def test_fault_12_hostile_forms_are_refused_before_they_reach_the_engine(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    deep: Any = {}
    for _ in range(50):
        deep = {"items": deep}
    hostile: list[dict[str, Any]] = [
        {"guided_choice": ["x"] * 100_000},
        {"guided_regex": "(" * 70 + ")" * 70},
        {"guided_regex": "a" * 200_000},
        {"guided_json": json.dumps({"title": "x" * 200_000})},
        {"guided_json": '{"a":' * 3000},
        {"guided_grammar": ""},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": [deep]},
            }
        },
    ]
    async with gateway.serving(replica := gateway.scripted(says(tokenizer, "x"))):
        for fields in hostile:
            reply = await gateway.client.chat(**fields)
            assert reply.status == 400, fields
            assert str(reply.error["param"]).startswith(next(iter(fields)))
    assert replica.received == []


GRAMMAR = 'start: "yes" | "no"'


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_fault_99_one_constraint_under_two_names_is_one(
    gateway: Gateway, tokenizer: Tokenizer, path: str
) -> None:
    twice: list[dict[str, Any]] = [
        {
            "structured_outputs": {"grammar": GRAMMAR, "backend": "guidance"},
            "guided_grammar": GRAMMAR,
            "guided_decoding_backend": "guidance",
        },
        {"structured_outputs": {"json": SCHEMA}, "guided_json": json.dumps(SCHEMA, indent=1)},
        {"response_format": json_schema(strict=True), "guided_json": SCHEMA},
        {"guided_choice": ["a", "b"], "structured_outputs": {"choice": ["a", "b"]}},
    ]
    replica = gateway.scripted(says(tokenizer, "x"))
    async with gateway.serving(replica):
        for fields in twice:
            reply = await getattr(gateway.client, path)(**fields)
            assert reply.status == 200, reply.body
    kinds = [request.sampling.structured_outputs.kind for request in replica.received]
    assert kinds == ["grammar", "json", "json", "choice"]


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_fault_99_constraints_that_differ_are_refused(served: Gateway, path: str) -> None:
    for fields, param in (
        ({"structured_outputs": {"grammar": GRAMMAR}, "guided_grammar": "start: /a/"},
         "guided_grammar"),
        ({"guided_json": SCHEMA, "structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}},
         "guided_json"),
        ({"structured_outputs": {"grammar": GRAMMAR, "backend": "none"}},
         "structured_outputs.backend"),
    ):  # fmt: skip
        reply = await getattr(served.client, path)(**fields)
        assert (reply.status, reply.error["param"]) == (400, param), reply.body
