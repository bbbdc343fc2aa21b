"""`POST /v1/chat/completions` before a replica that says what it's told."""

from __future__ import annotations

from typing import Any

import pytest

from engine.text.chat_template import render_chat
from engine.text.tokenizer import Tokenizer
from tests.inference.asgi_client import Reply, chat_body
from tests.inference.conftest import Gateway
from tests.inference.scripted import ScriptedReplica, byte_by_byte, says

TEXT = "Grüße! 🙂 One two three."


def contents(events: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    return "".join(
        choice["delta"].get("content") or ""
        for event in events[:-1]
        for choice in event["choices"]
        if choice["index"] == index
    )


async def ask(gateway: Gateway, replica: ScriptedReplica, **fields: Any) -> Reply:
    async with gateway.serving(replica):
        return await gateway.client.chat(**fields)


async def test_a_whole_answer_has_openais_shape(gateway: Gateway, tokenizer: Tokenizer) -> None:
    reply = await ask(gateway, gateway.scripted(says(tokenizer, TEXT)))
    assert reply.status == 200
    body = reply.json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("system_fingerprint").startswith("fp_")
    assert isinstance(body.pop("created"), int)
    prompt = render_chat(tokenizer, [{"role": "user", "content": "hello"}])
    completion = len(tokenizer.encode(TEXT)) + 1
    assert body == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": TEXT,
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "tool_calls": [],
                    "reasoning": None,
                    "reasoning_content": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": completion,
            "total_tokens": len(prompt) + completion,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "service_tier": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }
    assert int(reply.headers["content-length"]) == len(reply.body)
    assert reply.headers["content-type"] == "application/json"


async def test_the_engine_gets_the_rendered_prompt_and_the_callers_identity(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, "x"))
    await ask(gateway, replica, text="hi there", temperature=0.5, seed=7)
    (request,) = replica.received
    assert request.prompt_token_ids == render_chat(
        tokenizer, [{"role": "user", "content": "hi there"}]
    )
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 7)
    tenant = gateway.rows.tenant
    assert (request.tenant, request.cache_namespace) == (tenant.slug, tenant.cache_namespace)
    assert (request.weight, request.priority) == (tenant.weight, 0)


async def test_a_stream_has_role_text_finish_and_end(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(byte_by_byte(tokenizer, TEXT))
    reply = await ask(gateway, replica, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    events = reply.events
    assert events[-1] == "[DONE]"
    first, last = events[0], events[-2]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert contents(events) == TEXT
    for event in events[:-1]:
        assert event["object"] == "chat.completion.chunk"
        assert (event["id"], event["model"]) == (first["id"], "fake")
        assert "usage" not in event
    assert [e["choices"][0]["finish_reason"] for e in events[:-2]] == [None] * (len(events) - 2)


async def test_usage_comes_last_when_asked_for(gateway: Gateway, tokenizer: Tokenizer) -> None:
    replica = gateway.scripted(says(tokenizer, TEXT))
    async with gateway.serving(replica):
        baseline_outputs = await gateway.client.chat(
            stream=True, stream_options={"include_usage": True}
        )
        steady = await gateway.client.chat(
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    full_event = baseline_outputs.events[-2]
    assert full_event["choices"] == []
    assert full_event["usage"]["completion_tokens"] == len(tokenizer.encode(TEXT)) + 1
    assert all(event["usage"] is None for event in baseline_outputs.events[:-2])
    counts = [event["usage"]["completion_tokens"] for event in steady.events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == full_event["usage"]["completion_tokens"]


async def test_several_choices(gateway: Gateway, tokenizer: Tokenizer) -> None:
    replica = gateway.scripted(says(tokenizer, "first", "second one", "third"))
    async with gateway.serving(replica):
        full_outputs = await gateway.client.chat(n=3)
        stream = await gateway.client.chat(n=3, stream=True)
    choices = full_outputs.json()["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    assert [c["message"]["content"] for c in choices] == ["first", "second one", "third"]
    assert [contents(stream.events, i) for i in range(3)] == ["first", "second one", "third"]
    roles = [e for e in stream.events[:-1] if e["choices"][0]["delta"].get("role")]
    assert [e["choices"][0]["index"] for e in roles] == [0, 1, 2]


@pytest.mark.parametrize(("outputs", "numbered"), [(64, True), (65, False)])
async def test_streams_of_many_outputs_have_no_ids(
    served: Gateway, outputs: int, numbered: bool
) -> None:
    reply = await served.client.chat(n=outputs, stream=True, max_tokens=1)
    assert reply.status == 200, reply.body
    assert (b"\nid: " in b"\n" + reply.body) == numbered


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_the_engines_work(
    gateway: Gateway, tokenizer: Tokenizer, stream: bool
) -> None:
    replica = gateway.scripted(byte_by_byte(tokenizer, "before STOP after" * 20), token_delay=0.005)
    async with gateway.serving(replica):
        reply = await gateway.client.chat(stop=["STOP", "never"], stream=stream)
        (usage,) = await gateway.usage()
        for _ in range(100):
            if not replica.running:
                break
            await gateway.refresh()
        assert replica.running == {}
    assert len(replica.aborted) == 1
    if stream:
        assert contents(reply.events) == "before "
        assert reply.events[-2]["choices"][0]["finish_reason"] == "stop"
        assert reply.events[-2]["choices"][0]["stop_reason"] == "STOP"
    else:
        choice = reply.json()["choices"][0]
        assert choice["message"]["content"] == "before "
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "STOP")
        assert reply.json()["usage"]["completion_tokens"] == len("before STOP")
    assert (usage.completion_tokens, usage.status) == (len("before STOP"), 200)


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_name_tokens_and_bytes(
    gateway: Gateway, tokenizer: Tokenizer, stream: bool
) -> None:
    replica = gateway.scripted(byte_by_byte(tokenizer, "a🙂"))
    reply = await ask(gateway, replica, logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        entries = [
            entry
            for event in reply.events[:-1]
            for choice in event["choices"]
            for entry in (choice["logprobs"] or {"content": []})["content"]
        ]
    else:
        entries = reply.json()["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in entries for b in entry["bytes"]).decode() == "a🙂"
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] <= 0
    assert entries[0]["token"] == "a"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wish", [{}, {"return_token_ids": True}, {"skip_special_tokens": False}])
async def test_fault_100_logprobs_are_those_of_the_message(
    gateway: Gateway, tokenizer: Tokenizer, stream: bool, wish: dict[str, Any]
) -> None:
    end = tokenizer.eos_token_id
    assert end is not None
    replica = gateway.scripted(byte_by_byte(tokenizer, "Grüße!"))
    reply = await ask(gateway, replica, logprobs=True, stream=stream, **wish)
    assert joined_logprobs(reply, stream) == "Grüße!" + (tokenizer.token_text(end) if wish else "")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "text"), [("ß", "Grü"), ("ße", "Grü"), ("e!", "Grüß")])
@pytest.mark.parametrize("include", [False, True])
async def test_fault_100_logprobs_end_before_a_stop_string_that_is_left_out(
    gateway: Gateway, tokenizer: Tokenizer, stream: bool, stop: str, text: str, include: bool
) -> None:
    replica = gateway.scripted(byte_by_byte(tokenizer, "Grüße!"))
    fields = {"logprobs": True, "stream": stream, "stop": [stop]}
    reply = await ask(gateway, replica, **fields, include_stop_str_in_output=include)
    assert joined_logprobs(reply, stream) == text + stop * include


def joined_logprobs(reply: Any, stream: bool) -> str:
    """The text that a client puts together from the entries."""
    choices = (
        [choice for event in reply.events[:-1] for choice in event["choices"]]
        if stream
        else reply.json()["choices"]
    )
    parts = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
    return b"".join(bytes(entry["bytes"]) for part in parts for entry in part).decode()


async def test_without_top_logprobs_there_are_no_alternatives(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    reply = await ask(gateway, gateway.scripted(says(tokenizer, "x")), logprobs=True)
    assert reply.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_token_ids_are_returned_on_request(gateway: Gateway, tokenizer: Tokenizer) -> None:
    replica = gateway.scripted(says(tokenizer, TEXT))
    async with gateway.serving(replica):
        full_payload = (await gateway.client.chat(return_token_ids=True)).json()
        stream = (await gateway.client.chat(return_token_ids=True, stream=True)).events
    expected = [*tokenizer.encode(TEXT), 2]
    assert full_payload["prompt_token_ids"] == replica.received[0].prompt_token_ids
    assert full_payload["choices"][0]["token_ids"] == expected
    assert stream[0]["prompt_token_ids"] == full_payload["prompt_token_ids"]
    assert not any("prompt_token_ids" in event for event in stream[1:-1])
    assert "token_ids" not in stream[0]["choices"][0]
    streamed = [t for e in stream[1:-1] for c in e["choices"] for t in c["token_ids"]]
    assert streamed == expected


async def test_the_usage_begins_with_the_prompt_alone(served: Gateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (await served.client.chat(stream=True, stream_options=options)).events
    assert events[0]["usage"]["completion_tokens"] == 0
    assert events[0]["usage"]["total_tokens"] == events[0]["usage"]["prompt_tokens"] > 0
    used = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert used == sorted(used)
    assert used[-1] > 0


async def test_defaults_come_from_the_models_generation_config(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, "x"))
    replica.model.default_sampling = {"temperature": 0.3, "top_k": 5, "max_new_tokens": 9}
    async with gateway.serving(replica):
        await gateway.client.chat()
        await gateway.client.chat(temperature=0, top_k=-1)
    first, second = (request.sampling for request in replica.received)
    assert (first.temperature, first.top_k) == (0.3, 5)
    assert (second.temperature, second.top_k) == (0, -1)


async def test_every_sampling_field_reaches_the_engine(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.2,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "stop_token_ids": [40],
        "ignore_eos": False,
        "allowed_token_ids": [10, 11, 12],
        "seed": 3,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
        "prompt_logprobs": 1,
    }
    replica = gateway.scripted(says(tokenizer, "x"))
    await ask(
        gateway,
        replica,
        **fields,
        logit_bias={"11": -5},
        bad_words=["fox"],
        max_completion_tokens=33,
    )
    sampling = replica.received[0].sampling
    for name, value in fields.items():
        assert getattr(sampling, name) == value, name
    assert sampling.logit_bias == {11: -5}
    assert sampling.max_tokens == 33
    assert tokenizer.encode(" fox", False) in (sampling.bad_words_token_ids or [])


async def test_roles_and_content_parts(gateway: Gateway, tokenizer: Tokenizer) -> None:
    replica = gateway.scripted(says(tokenizer, "x"))
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three", "name": "joe"},
    ]
    async with gateway.serving(replica):
        reply = await gateway.client.chat(messages=messages)
    assert reply.status == 200
    text = tokenizer.decode(replica.received[0].prompt_token_ids, skip_special_tokens=False)
    assert "<|im_start|>system\nbe brief<|im_end|>" in text
    assert "<|im_start|>user\none<|im_end|>" in text


async def test_the_final_message_is_continued(gateway: Gateway, tokenizer: Tokenizer) -> None:
    replica = gateway.scripted(says(tokenizer, " fox"))
    messages = [
        {"role": "user", "content": "say it"},
        {"role": "assistant", "content": "the quick brown"},
    ]
    async with gateway.serving(replica):
        fields = {"messages": messages, "continue_final_message": True}
        reply = await gateway.client.chat(**fields, echo=True)
        stream = await gateway.client.chat(**fields, echo=True, stream=True)
    text = tokenizer.decode(replica.received[0].prompt_token_ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nthe quick brown")
    assert reply.json()["choices"][0]["message"]["content"] == "the quick brown fox"
    assert contents(stream.events) == "the quick brown fox"


async def test_the_prompt_is_truncated_from_the_left(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, "x"))
    await ask(gateway, replica, truncate_prompt_tokens=4)
    full_prompt = render_chat(tokenizer, [{"role": "user", "content": "hello"}])
    assert replica.received[0].prompt_token_ids == full_prompt[-4:]


async def test_a_cache_salt_narrows_the_tenants_namespace(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, "x"))
    async with gateway.serving(replica):
        for salt in (None, "a", "b", "a", gateway.rows.tenant.cache_namespace):
            await gateway.client.chat(cache_salt=salt)
    baseline_cache_namespace, a, b, again, forged = (
        request.cache_namespace for request in replica.received
    )
    assert baseline_cache_namespace == gateway.rows.tenant.cache_namespace
    assert a == again
    assert len({baseline_cache_namespace, a, b, forged}) == 4


async def test_best_of_returns_the_likeliest(gateway: Gateway, tokenizer: Tokenizer) -> None:
    replica = gateway.scripted(says(tokenizer, "a", "b", "c"))
    original = replica._advance

    def advance(request: Any, sequence: Any) -> Any:
        delta = original(request, sequence)
        for scores in delta.logprobs or []:
            scores.logprobs[0] = {0: -3.0, 1: -1.0, 2: -2.0}[sequence.index]
        return delta

    replica._advance = advance  # type: ignore[method-assign]
    reply = await ask(gateway, replica, n=2, best_of=3)
    choices = reply.json()["choices"]
    assert [c["message"]["content"] for c in choices] == ["b", "c"]
    assert [c["index"] for c in choices] == [0, 1]
    assert choices[0]["logprobs"] is None
    assert reply.json()["usage"]["completion_tokens"] == 6


async def test_headers_tell_id_time_and_what_was_ignored(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "x"))):
        reply = await gateway.client.post(
            "/v1/chat/completions",
            chat_body(frobnicate=1, 中文=2, prompt_cache_key="k"),
            headers={"X-Request-Id": "trace-1.2"},
        )
    assert reply.status == 200
    assert reply.headers["x-request-id"] == "trace-1.2"
    assert int(reply.headers["openai-processing-ms"]) >= 0
    ignored = reply.headers["x-quire-ignored-fields"]
    assert "frobnicate" in ignored
    assert "prompt_cache_key" in ignored


async def test_strict_mode_refuses_unknown_fields(gateway: Gateway, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(strict=True)
    reply = await gateway.client.chat(frobnicate=1)
    assert reply.status == 400
    assert reply.error["param"] == "frobnicate"
    assert reply.error["code"] == "unknown_parameter"


async def test_a_message_for_the_tools_reaches_the_template(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, "fine"))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    async with gateway.serving(replica):
        reply = await gateway.client.chat(messages=messages)
    assert reply.status == 200
    text = tokenizer.decode(replica.received[0].prompt_token_ids, skip_special_tokens=False)
    assert '<tool_call>{"a": 1}</tool_call>' in text


async def test_a_chatbots_second_turn(gateway: Gateway, tokenizer: Tokenizer) -> None:
    """As vLLM's Gradio example sends it: no stop tokens in a list, all turns so far, streamed."""
    messages = [
        {"role": "system", "content": "You are a great ai assistant."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    fields: dict[str, Any] = {"temperature": 0.8, "repetition_penalty": 1, "stop_token_ids": []}
    replica = gateway.scripted(says(tokenizer, TEXT))
    async with gateway.serving(replica):
        reply = await gateway.client.chat(messages=messages, stream=True, **fields)
    assert contents(reply.events) == TEXT
    sampling = replica.received[0].sampling
    assert not sampling.stop_token_ids
    assert sampling.repetition_penalty == 1
