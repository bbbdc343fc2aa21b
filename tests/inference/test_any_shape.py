"""Whatever JSON stands at any place of a body: an answer, or a refusal; never a fault of ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.inference.conftest import Gateway

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = {"type": "text", "text": "x"}
RESPONSE = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "include": ["message.output_text.logprobs"],
    "metadata": {"a": "b"},
    "max_output_tokens": 2,
    "previous_response_id": None,
}
MESSAGE = {
    "system": [TEXT],
    "messages": [
        {"role": "user", "content": [TEXT]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "x", "signature": ""},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": [TEXT]}],
        },
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f"},
    "output_config": {"format": None},
    "metadata": {"user_id": "u"},
    "max_tokens": 2,
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {
    "messages": [
        {"role": "user", "content": [TEXT]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    "stream_options": None,
    "logit_bias": {"5": 1},
    "metadata": {"a": "b"},
    "store": True,
    "max_tokens": 2,
}
COMPLETION = {
    "prompt": ["x", "y"],
    "suffix": None,
    "logprobs": 1,
    "stop": ["a"],
    "structured_outputs": {"choice": ["a", "b"]},
    "stream_options": None,
    "allowed_token_ids": [5],
    "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
    "max_tokens": 2,
}
BATCH = {
    "input_file_id": "file-" + "0" * 32,
    "endpoint": "/v1/responses",
    "completion_window": "24h",
    "metadata": {"a": "b"},
    "output_expires_after": {"anchor": "created_at", "seconds": 3600},
}
SHAPES: tuple[Any, ...] = (None, True, -1, 2.5, "", "x", [], [[]], {}, {"type": 5}, [{"type": "x"}])


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a body, the body itself left out."""
    if path:
        yield path
    pairs = value.items() if isinstance(value, dict) else ()
    for key, child in enumerate(value) if isinstance(value, list) else pairs:
        yield from paths_of(child, (*path, key))


def changed(body: dict[str, Any], path: tuple[Any, ...], shape: Any) -> dict[str, Any]:
    duplicate = copy.deepcopy(body)
    parent: Any = duplicate
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = shape
    return duplicate


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", RESPONSE),
        ("/v1/messages", MESSAGE),
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETION),
        ("/v1/batches", BATCH),
    ],
)
async def test_no_shape_of_a_body_is_a_fault(
    served: Gateway, path: str, body: dict[str, Any]
) -> None:
    if path != "/v1/batches":
        body = {"model": "fake", **body}
        full_response = await served.client.post(path, body)
        assert full_response.status == 200, full_response.body
    for number, index in enumerate(paths_of(body)):
        for shape in SHAPES[number % 2 :: 2]:  # every other one at each place
            reply = await served.client.post(path, changed(body, index, shape))
            assert reply.status < 500, (index, shape, reply.body)
