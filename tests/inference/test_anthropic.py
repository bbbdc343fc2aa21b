"""`/v1/messages`: Anthropic's API, its events, its errors."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from pydantic import TypeAdapter

from engine.text.tokenizer import Tokenizer
from inference.edge.handler import GatewayHandler
from tests.inference.asgi_client import AsgiClient, Reply, parse_events
from tests.inference.conftest import Gateway
from tests.inference.scripted import says

URL = "/v1/messages"
TOOL = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@cache
def event_type() -> TypeAdapter[Any]:
    import anthropic

    return TypeAdapter(anthropic.types.RawMessageStreamEvent)


async def ask(gateway: Gateway, content: Any = "hello", **fields: Any) -> Reply:
    body = {"model": "fake", "max_tokens": 300, "messages": [{"role": "user", "content": content}]}
    return await gateway.client.post(URL, body | fields)


async def test_a_message_in_one_body(gateway: Gateway, tokenizer: Tokenizer) -> None:
    import anthropic

    async with gateway.serving(gateway.scripted(says(tokenizer, "a fox"))):
        reply = await ask(gateway, metadata={"user_id": "me"})
    message = anthropic.types.Message.model_validate(reply.json())
    assert [block.text for block in message.content] == ["a fox"]
    assert (message.stop_reason, message.stop_sequence, message.role) == (
        "end_turn",
        None,
        "assistant",
    )
    assert message.id.startswith("msg")
    assert message.usage.input_tokens > 0
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    (record,) = await gateway.usage()
    assert record.endpoint == "messages"


async def test_arguments_that_are_no_object_are_none(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    deep = "[" * 240 + "]" * 240
    call = CALL.replace('{"city": "Rome"}', deep)
    async with gateway.serving(gateway.scripted(says(tokenizer, call))):
        message = (await ask(gateway, tools=[TOOL], max_tokens=1500)).json()
    assert message["content"][0]["input"] == {}


async def test_why_it_stopped(gateway: Gateway, tokenizer: Tokenizer) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "one two three"))):
        cut = (await ask(gateway, max_tokens=2)).json()
        assert cut["stop_reason"] == "max_tokens"
        stopped = (await ask(gateway, stop_sequences=["two"])).json()
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
        assert stopped["content"][0]["text"] == "one "


async def test_fault_06_any_max_tokens_is_a_ceiling(gateway: Gateway, tokenizer: Tokenizer) -> None:
    replica = gateway.scripted(says(tokenizer, "a fox"))
    async with gateway.serving(replica):
        for limit in (2048, 100_000, 2**31 - 1):
            assert (await ask(gateway, max_tokens=limit)).status == 200
        assert (await ask(gateway, "word " * 5000, max_tokens=100_000)).status == 400
    (budget,) = {2048 - len(request.prompt_token_ids) for request in replica.received}
    assert [request.sampling.max_tokens for request in replica.received] == [budget] * 3


async def test_fault_07_a_ceiling_is_cut_to_the_kv_pool_too(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, "a fox"))
    replica.model.kv_capacity_tokens = 100
    async with gateway.serving(replica):
        assert (await ask(gateway, max_tokens=100_000)).status == 200
    (request,) = replica.received
    assert len(request.prompt_token_ids) + (request.sampling.max_tokens or 0) == 100


DOCUMENT = {
    "type": "document",
    "title": "Foxes",
    "context": "from a book",
    "source": {"type": "text", "media_type": "text/plain", "data": "They jump."},
    "citations": {"enabled": True},
}
PARTS = {"type": "content", "content": [{"type": "text", "text": text} for text in "ab"]}


async def test_documents_of_text_are_read_and_others_refused(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, "a fox"))
    question = {"type": "text", "text": "What do they do?"}
    async with gateway.serving(replica):
        reply = await ask(gateway, [DOCUMENT, question])
        await ask(gateway, [{"type": "document", "source": PARTS}, question])
        for source in ({"type": "tape"}, {"type": ["url"]}, {}):
            refused = await ask(gateway, [{"type": "document", "source": source}])
            assert refused.status == 400
            assert "messages.0.content.0.source.type" in refused.json()["error"]["message"]
    assert reply.headers["x-quire-ignored-fields"] == "messages.0.content.0.citations"
    texts = [tokenizer.decode(request.prompt_token_ids) for request in replica.received]
    assert "Foxes\nfrom a book\nThey jump.\nWhat do they do?" in texts[0]
    assert "a\nb\nWhat do they do?" in texts[1]


async def test_a_message_is_never_without_a_block(gateway: Gateway, tokenizer: Tokenizer) -> None:
    import anthropic

    async with gateway.serving(gateway.scripted(says(tokenizer, ""))):
        full = anthropic.types.Message.model_validate((await ask(gateway)).json())
        stream = await ask(gateway, stream=True)
    assert [block.text for block in full.content] == [""]
    kinds = [event["type"] for event in parse_events(stream.body) if event["type"] != "ping"]
    assert kinds == [
        *("message_start", "content_block_start", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


async def test_a_conversation_with_tools_is_the_chat_it_tells_of(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "sun"}],
                },
                {"type": "text", "text": "thanks"},
            ],
        },
    ]
    function = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    chat = [
        {"role": "system", "content": "be brief\nbe kind"},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sun"},
        {"role": "user", "content": "thanks"},
    ]
    system = [{"type": "text", "text": "be brief"}, {"type": "text", "text": "be kind"}]
    parameters = TOOL["input_schema"]
    tool = {"name": "get_weather", "description": "The weather.", "parameters": parameters}
    async with gateway.serving(gateway.scripted(says(tokenizer, "ok"))) as replica:
        assert (await ask(gateway, messages=messages, system=system, tools=[TOOL])).status == 200
        other = await gateway.client.chat(
            messages=chat, tools=[{"type": "function", "function": tool}]
        )
        assert other.status == 200
        first, second = replica.received
        assert first.prompt_token_ids == second.prompt_token_ids


async def test_turns_of_one_role_that_follow_each_other_are_one(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "sun"}
    split: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "I look."},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
        {"role": "user", "content": "so?"},
    ]
    full = [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    async with gateway.serving(gateway.scripted(says(tokenizer, "ok"))) as replica:
        for messages in (split, full):
            assert (await ask(gateway, messages=messages, tools=[TOOL])).status == 200
        first, second = replica.received
        assert first.prompt_token_ids == second.prompt_token_ids


async def test_the_betas_name_for_the_answers_form_is_taken(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    async with gateway.serving(gateway.scripted(says(tokenizer, "{}"))) as replica:
        for fields in ({"output_format": form}, {"output_config": {"format": form}}):
            assert (await ask(gateway, **fields)).status == 200
        first, second = (one.sampling.structured_outputs for one in replica.received)
        assert first == second is not None
        both = await ask(gateway, output_format=form, output_config={"format": form})
        assert both.status == 400


async def test_models_are_listed_as_the_sdk_reads_them(served: Gateway) -> None:
    import anthropic

    headers = {"anthropic-version": "2023-06-01"}
    page = (await served.client.get("/v1/models", headers=headers)).json()
    (model,) = [anthropic.types.ModelInfo.model_validate(item) for item in page["data"]]
    assert (model.id, model.type, page["has_more"]) == ("fake", "model", False)
    one = (await served.client.get("/v1/models/fake", headers=headers)).json()
    assert one == page["data"][0]


@pytest.mark.parametrize("path", ["/v1/models/nobody", "/v1/skills", "/v1/models"])
async def test_errors_of_shared_paths_are_as_the_sdk_reads_them(served: Gateway, path: str) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    if path == "/v1/models":
        headers["authorization"] = "Bearer nonsense"
    reply = await served.client.get(path, headers=headers)
    kind = "authentication_error" if reply.status == 401 else "not_found_error"
    assert reply.status in (401, 404)
    assert (reply.json()["type"], reply.json()["error"]["type"]) == ("error", kind)
    assert reply.json()["request_id"] == reply.headers["x-request-id"]
    del headers["anthropic-version"]
    assert (await served.client.get(path, headers=headers)).error["type"]


async def test_other_paths_are_404_in_the_envelope(served: Gateway) -> None:
    reply = await served.client.post(f"{URL}/nothing", {})
    assert reply.status == 404
    assert reply.json()["error"]["type"] == "not_found_error"
    assert reply.headers["request-id"] == reply.json()["request_id"]


async def test_the_last_words_of_the_assistant_are_gone_on_from(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The fox"}]
    async with gateway.serving(gateway.scripted(says(tokenizer, " runs"))) as replica:
        reply = await ask(gateway, messages=messages)
        prompt = tokenizer.decode(replica.received[0].prompt_token_ids, False)
    assert prompt.endswith("The fox")
    assert reply.json()["content"][0]["text"] == " runs"


@pytest.mark.parametrize("text", ["plain words", f"Let me see.\n{CALL}", f"{CALL}\n{CALL}"])
async def test_the_streams_events_are_the_sdks_and_tell_the_same(
    gateway: Gateway, tokenizer: Tokenizer, text: str
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, text))):
        reply = await ask(gateway, stream=True, tools=[TOOL])
        full_payload = (await ask(gateway, tools=[TOOL])).json()
    raw = parse_events(reply.body)
    names = [line[7:] for line in reply.body.decode().split("\n") if line.startswith("event: ")]
    assert names == [event["type"] for event in raw]
    assert names[:2] == ["message_start", "ping"]
    assert raw[0]["message"]["usage"]["output_tokens"] == 0
    assert names[-2:] == ["message_delta", "message_stop"]
    for event in raw:
        if event["type"] != "ping":
            event_type().validate_python(event)
    blocks: list[dict[str, Any]] = []
    for event in raw:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"told": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]]["told"] += delta.get("text", delta.get("partial_json", ""))
    payloads = [
        json.loads(block["told"]) if block["type"] == "tool_use" else block["told"]
        for block in blocks
    ]
    assert payloads == [block.get("input", block.get("text")) for block in full_payload["content"]]
    assert raw[-2]["delta"]["stop_reason"] == full_payload["stop_reason"]
    assert raw[-2]["usage"]["output_tokens"] == full_payload["usage"]["output_tokens"]


async def test_tokens_are_counted_as_generation_would(served: Gateway) -> None:
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "hello"}],
        "system": "be brief",
        "tools": [TOOL],
    }
    counted = (await served.client.post(f"{URL}/count_tokens", body)).json()
    usage = (await served.client.post(URL, body | {"max_tokens": 1})).json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


async def test_x_api_key_opens_and_errors_are_anthropics(gateway: Gateway) -> None:
    client = AsgiClient(GatewayHandler())
    body = {"model": "nobody", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    unknown_response = await client.post(URL, body)
    assert unknown_response.status == 401
    assert unknown_response.json()["type"] == "error"
    assert unknown_response.json()["error"]["type"] == "authentication_error"
    missing = await client.post(URL, body, headers={"x-api-key": gateway.rows.secret})
    assert missing.status == 404
    assert missing.json()["error"]["type"] == "not_found_error"
    assert missing.json()["request_id"] == missing.headers["request-id"]
    invalid_response = await client.get(URL, headers={"x-api-key": gateway.rows.secret})
    assert (invalid_response.status, invalid_response.json()["type"]) == (405, "error")


async def test_fault_01_a_body_over_the_limit_is_refused_in_the_envelope(
    gateway: Gateway, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_body_bytes=1000)
    reply = await ask(gateway, "x" * 2000)
    assert (reply.status, reply.json()["error"]["type"]) == (413, "request_too_large")


async def test_fault_27_a_fault_in_the_middle_is_an_error_event(gateway: Gateway) -> None:
    async with gateway.serving(gateway.failing()):
        reply = await ask(gateway, stream=True, max_tokens=500)
    last = parse_events(reply.body)[-1]
    assert last["type"] == "error"
    assert last["error"] == {"type": "api_error", "message": "The step failed."}


async def test_fault_87_a_block_for_the_server_alone_leaves_the_prompt_as_it_is(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    system = [{"type": "text", "text": "be brief"}]
    async with gateway.serving(gateway.scripted(says(tokenizer, "ok"))) as replica:
        for number in range(3):
            billing = f"x-anthropic-billing-header: cc_version=2.1; cch={number};"
            block = [{"type": "text", "text": billing}] if number else []
            reply = await ask(gateway, messages=[USER], system=[*block, *system])
            assert reply.status == 200, reply.body
            # Some proxies join the blocks.
            for joined in (
                f"{billing}\nbe brief",
                [{"type": "text", "text": f"{billing}\nbe brief"}],
            ):
                reply = await ask(gateway, messages=[USER], system=joined)
                assert reply.status == 200, reply.body
        assert len({tuple(request.prompt_token_ids) for request in replica.received}) == 1


async def test_fault_87_a_tool_that_is_not_strict_leaves_the_prompt_as_it_is(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "ok"))) as replica:
        for tool in (TOOL, {**TOOL, "strict": False}):
            reply = await ask(gateway, messages=[USER], tools=[tool])
            assert reply.status == 200, reply.body
    assert len({tuple(request.prompt_token_ids) for request in replica.received}) == 1


async def test_fault_88_an_overflow_is_told_in_the_words_that_agents_know(served: Gateway) -> None:
    for size in (700, 70_000):
        reply = await ask(served, messages=[{"role": "user", "content": "€" * size}])
        error = reply.json()["error"]
        assert (reply.status, error["type"]) == (400, "invalid_request_error")
        words = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
        assert words is not None, error
        assert int(words[1]) > int(words[2])


async def test_fault_88_a_tool_is_offered_without_those_of_the_server(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    advisor = {"type": "advisor_20260301", "name": "advisor", "model": "claude-opus-4-6"}
    async with gateway.serving(gateway.scripted(says(tokenizer, "ok"))) as replica:
        for tools in ([TOOL], [hosted, TOOL], [TOOL, advisor]):
            assert (await ask(gateway, messages=[USER], tools=tools)).status == 200
        first, *other_items = replica.received
        assert all(other.prompt_token_ids == first.prompt_token_ids for other in other_items)
        reply = await ask(gateway, messages=[USER], tools=[hosted])
        assert reply.status == 400
        assert "tools.0.type" in reply.json()["error"]["message"]


async def test_search_results_are_text(gateway: Gateway, tokenizer: Tokenizer) -> None:
    search_result = {
        "type": "search_result",
        "title": "T",
        "source": "https://a",
        "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}],
    }
    async with gateway.serving(gateway.scripted(says(tokenizer, "ok"))) as replica:
        for content in ([search_result], "T\nhttps://a\nb\nc"):
            reply = await ask(gateway, messages=[{"role": "user", "content": content}])
            assert reply.status == 200, reply.body
        first, second = replica.received
        assert first.prompt_token_ids == second.prompt_token_ids


async def test_fault_88_tools_that_a_search_has_given_are_named(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    use = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {"query": "weather"}}
    reference = {"type": "tool_reference", "tool_name": "get_weather"}
    async with gateway.serving(gateway.scripted(says(tokenizer, "ok"))) as replica:
        for content in ([reference], "Tool available: get_weather"):
            result = {"type": "tool_result", "tool_use_id": "t", "content": content}
            reply = await ask(
                gateway,
                messages=[
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": [use]},
                    {"role": "user", "content": [result]},
                ],
                tools=[TOOL, {**TOOL, "name": "ToolSearch", "defer_loading": False}],
            )
            assert reply.status == 200, reply.body
        first, second = replica.received
        assert first.prompt_token_ids == second.prompt_token_ids


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t", "content": [{"text": "x"}]}
                        ],
                    }
                ]
            },
            "messages.0.content.0.content.0.type",
        ),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "x", "input_schema": {"type": "array"}}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"chat_template": "x"}, "chat_template"),  # fault 14
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template": "x"}}, "extra_body"),
        ({"metadata": {"user_id": "a\nb"}}, "metadata.user_id"),
        ({"priority": -1}, "priority"),
    ],
)
async def test_fault_05_what_is_wrong_is_named_in_the_clients_words(
    served: Gateway, fields: dict[str, Any], named: str
) -> None:
    body = {"model": "fake", "max_tokens": 5, "messages": [USER]} | fields
    reply = await served.client.post(URL, body)
    assert reply.status == 400, reply.body
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]
