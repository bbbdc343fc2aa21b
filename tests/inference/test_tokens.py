"""Token ids in and out, and requests rendered to them; `/generate` and `/invocations`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from tests.inference.conftest import Gateway, generated_tokens
from tests.inference.scripted import says
from tests.inference.test_chat_tools import TOOL

URL = "/inference/v1/generate"
USER = {"role": "user", "content": "hello"}


async def test_ids_come_back_for_ids(served: Gateway) -> None:
    prompt = [50, 60, 70]
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 5, "n": 2, "seed": 3}}
    payload = (await served.client.post(URL, body)).json()
    assert [choice["token_ids"] for choice in payload["choices"]] == [
        generated_tokens(prompt, 5, index) for index in range(2)
    ]
    assert {choice["finish_reason"] for choice in payload["choices"]} == {"length"}
    assert payload["usage"]["total_tokens"] == 3 + 10
    assert payload["choices"][0]["logprobs"] is payload["prompt_token_ids"] is None
    assert "text" not in payload["choices"][0]
    stream = await served.client.post(URL, body | {"stream": True})
    streamed: list[list[int]] = [[], []]
    for event in stream.events[:-1]:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["token_ids"]
    assert streamed == [choice["token_ids"] for choice in payload["choices"]]
    (record, _) = await served.usage()
    assert (record.prompt_tokens, record.completion_tokens) == (3, 10)


async def test_what_else_may_come_with_the_ids(served: Gateway, tokenizer: Tokenizer) -> None:
    body = {
        "request_id": "mine",
        "token_ids": [50, 60],
        "return_token_ids": True,
        "output_mode": "text",
        "sampling_params": {"max_tokens": 4, "logprobs": 2, "detokenize": True},
    }
    payload = (await served.client.post(URL, body)).json()
    (choice,) = payload["choices"]
    assert (payload["request_id"], payload["prompt_token_ids"]) == ("mine", [50, 60])
    assert choice["text"] == tokenizer.decode(choice["token_ids"])
    assert len(choice["logprobs"]["content"]) == 4
    body["output_mode"] = "tokens"
    (choice,) = (await served.client.post(URL, body)).json()["choices"]
    first = choice["logprobs"]["content"][0]
    assert first["token_id"] == choice["token_ids"][0]
    assert {"logprob", "rank"} <= first.keys()
    assert len(first["top_logprobs"]) == 2
    body["sampling_params"]["logprobs"] = 0
    (choice,) = (await served.client.post(URL, body)).json()["choices"]
    isolated_top_logprobs = choice["logprobs"]["content"][0]["top_logprobs"]
    assert [top["token_id"] for top in isolated_top_logprobs] == choice["token_ids"][:1]
    options = {"include_usage": True}
    stream = await served.client.post(URL, body | {"stream": True, "stream_options": options})
    assert stream.events[0]["prompt_token_ids"] == [50, 60]
    assert stream.events[-2]["usage"]["completion_tokens"] == 4


async def test_without_a_limit_the_context_is_one(gateway: Gateway) -> None:
    async with gateway.serving(gateway.fake(max_model_len=256)):
        payload = (await gateway.client.post(URL, {"token_ids": [5] * 40})).json()
    assert payload["usage"]["total_tokens"] == 256


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [512]}, "token_ids"),  # fault 3
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids[0]"),
        ({"token_ids": "x"}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),  # fault 8
        (
            {"output_mode": "text", "sampling_params": {"detokenize": False}},
            "sampling_params.detokenize",
        ),
        (
            {"sampling_params": {"detokenize": False, "stop": "x"}},
            "sampling_params.detokenize",
        ),
        ({"sampling_params": {"stop": [""]}}, "sampling_params.stop"),  # fault 11
        ({"sampling_params": {"thinking": {}}}, "sampling_params.thinking"),
        ({"sampling_params": {"thinking": {"end": [[]]}}}, "sampling_params.thinking.end"),
        ({"sampling_params": {"thinking": {"end": [[10**6]]}}}, "sampling_params.thinking"),
        ({"sampling_params": {"cache_salt": "x"}}, "sampling_params.cache_salt"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"output_mode": "derender"}, "output_mode"),
        ({"priority": -1}, "priority"),  # fault 18
    ],
)
async def test_fault_03_what_is_wrong_is_named(
    served: Gateway, fields: dict[str, Any], param: str
) -> None:
    reply = await served.client.post(URL, {"token_ids": [5], **fields})
    assert (reply.status, reply.error["param"]) == (400, param), reply.body


FORMED = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": 4, "temperature": 0.5}),
        ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL], "tool_choice": "required"}),
        ("/v1/chat/completions", {"messages": [USER], "logit_bias": {"7": 3.0}, **FORMED}),
        ("/v1/completions", {"prompt": ["the fox", "a dog"], "stop": ["zz"], "seed": 4}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 6}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 7, "top_k": 3}),
    ],
)
async def test_what_is_rendered_runs_as_the_request_would(
    gateway: Gateway, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    replica = gateway.scripted(says(tokenizer, "x"))
    async with gateway.serving(replica):
        assert (await gateway.client.post(path, body)).status == 200
        rendered = (await gateway.client.post(f"{path}/render", body)).json()
        meant = list(replica.received)
        for one in rendered if isinstance(rendered, list) else [rendered]:
            reply = await gateway.client.post(URL, one)
            assert reply.status == 200, reply.body
    ran = replica.received[len(meant) :]
    assert len(ran) == len(meant)
    for initial_output, after in zip(meant, ran, strict=True):
        assert after.prompt_token_ids == initial_output.prompt_token_ids
        initial_output.sampling.seed = after.sampling.seed = None if "seed" not in body else 4
        assert after.sampling.max_tokens == (initial_output.sampling.max_tokens)
        assert after.sampling == initial_output.sampling


async def test_rendering_needs_a_key_and_a_good_request(served: Gateway) -> None:
    path = "/v1/chat/completions/render"
    invalid_response = await served.client.post(path, {"messages": [USER], "temperature": -1})
    assert (invalid_response.status, invalid_response.error["param"]) == (400, "temperature")
    assert (await served.client.get(path)).status == 405
    long = await served.client.post("/v1/responses/render", {"input": "the fox " * 5000})
    assert (long.status, long.error["param"]) == (400, "input")
    served.client.key = None
    for path in ("/v1/chat/completions/render", "/v1/completions/render", URL, "/generate"):
        assert (await served.client.post(path, {"prompt": "x"})).status == 401


async def test_the_oldest_endpoint_gives_texts_with_their_prompt(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    body = {"prompt": "the fox", "n": 2, "max_tokens": 9}
    async with gateway.serving(gateway.scripted(says(tokenizer, " jumps", " runs"))):
        full_response = await gateway.client.post("/generate", body)
        stream = await gateway.client.post("/generate", body | {"stream": True})
        invalid_response = await gateway.client.post("/generate", {"prompt": [5, 6]})
    assert full_response.json() == {"text": ["the fox jumps", "the fox runs"]}
    *parts, rest = stream.body.split(b"\0")
    lines = [json.loads(part) for part in parts]
    assert rest == b""
    assert stream.headers["content-type"] == "text/plain"
    assert lines[-1] == full_response.json()
    assert len(lines) > 1
    assert (invalid_response.status, invalid_response.error["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": [USER]}, "chat.completion"),
        ({"prompt": "the fox"}, "text_completion"),
    ],
)
async def test_an_invocation_finds_its_endpoint(served: Gateway, body: Any, kind: str) -> None:
    reply = await served.client.post("/invocations", body)
    assert (reply.status, reply.json()["object"]) == (200, kind)
    stream = await served.client.post("/invocations", body | {"stream": True})
    assert stream.body.endswith(b"data: [DONE]\n\n")


async def test_an_invocation_of_nothing_is_told_what_there_is(served: Gateway) -> None:
    reply = await served.client.post("/invocations", {"model": "fake"})
    assert reply.status == 400
    assert "messages; prompt; query and documents" in reply.error["message"]
    embeddings = await served.client.post("/invocations", {"input": "x"})
    assert (embeddings.status, embeddings.error["param"]) == (400, "model")
