"""Every field of chats and completions: it has an effect, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.contract.messages import EngineRequest
from engine.text.tokenizer import Tokenizer
from inference.schemas.base import IGNORED_HINTS, UNSUPPORTED
from inference.schemas.chat import ChatRequest
from inference.schemas.completions import CompletionRequest
from tests.inference.asgi_client import Reply
from tests.inference.conftest import Gateway
from tests.inference.scripted import says
from tests.inference.test_chat_tools import TOOL
from tests.inference.tokenizer_folder import with_template

Effect = Callable[[EngineRequest, Reply], bool]


def sampled(name: str, value: Any) -> Effect:
    """The engine's sampling has this value."""
    return lambda request, reply: getattr(request.sampling, name) == value


def answers(path: str, value: Any) -> Effect:
    """The answer has this value at `a.0.b`."""

    def check(request: EngineRequest, reply: Reply) -> bool:
        payload: Any = reply.json()
        for part in path.split("."):
            payload = payload[int(part) if part.isdigit() else part]
        return bool(payload == value)

    return check


def formed(kind: str, value: Any) -> Effect:
    def check(request: EngineRequest, reply: Reply) -> bool:
        params = request.sampling.structured_outputs
        return params is not None and getattr(params, kind) == value

    return check


SCHEMA = {"type": "object"}
#: field -> value, effect.
BOTH: dict[str, tuple[Any, Effect]] = {
    "model": ("fake", answers("model", "fake")),
    "n": (2, lambda request, reply: len(reply.json()["choices"]) == 2),
    "best_of": (3, sampled("best_of", 3)),
    "stream": (True, lambda request, reply: reply.body.endswith(b"data: [DONE]\n\n")),
    "temperature": (0.5, sampled("temperature", 0.5)),
    "top_p": (0.5, sampled("top_p", 0.5)),
    "top_k": (5, sampled("top_k", 5)),
    "min_p": (0.1, sampled("min_p", 0.1)),
    "presence_penalty": (1.0, sampled("presence_penalty", 1.0)),
    "frequency_penalty": (1.0, sampled("frequency_penalty", 1.0)),
    "repetition_penalty": (1.5, sampled("repetition_penalty", 1.5)),
    "repetition_detection": (
        {"max_pattern_size": 3, "min_count": 4},
        lambda request, reply: request.sampling.repetition_detection.min_count == 4,
    ),
    "use_beam_search": (True, sampled("use_beam_search", True)),
    "length_penalty": (2.0, sampled("length_penalty", 2.0)),
    "early_stopping": ("never", sampled("early_stopping", "never")),
    "seed": (7, sampled("seed", 7)),
    "stop": (["zz"], sampled("stop", ["zz"])),
    "stop_token_ids": ([5], sampled("stop_token_ids", [5])),
    "include_stop_str_in_output": (True, sampled("include_stop_str_in_output", True)),
    "bad_words": (["zz"], lambda request, reply: bool(request.sampling.bad_words_token_ids)),
    "allowed_token_ids": ([5, 6], sampled("allowed_token_ids", [5, 6])),
    "logit_bias": ({"5": 1.0}, sampled("logit_bias", {5: 1.0})),
    "ignore_eos": (True, sampled("ignore_eos", True)),
    "vllm_xargs": ({"target": [1, "a"]}, sampled("extra_args", {"target": [1, "a"]})),
    "max_tokens": (3, sampled("max_tokens", 3)),
    "min_tokens": (1, sampled("min_tokens", 1)),
    "prompt_logprobs": (1, sampled("prompt_logprobs", 1)),
    "skip_special_tokens": (False, sampled("skip_special_tokens", False)),
    "spaces_between_special_tokens": (False, sampled("spaces_between_special_tokens", False)),
    "truncate_prompt_tokens": (2, lambda request, reply: len(request.prompt_token_ids) == 2),
    "priority": (3, lambda request, reply: request.priority == 3),
    "service_tier": ("flex", lambda request, reply: request.priority > 0),
    "metadata": ({"a": "b"}, answers("metadata", {"a": "b"})),
    "user": ("me", lambda request, reply: reply.status == 200),
    "cache_salt": ("salt", lambda request, reply: request.cache_namespace != NAMESPACE[0]),
    "kv_transfer_params": (
        {"do_remote_prefill": True},
        lambda request, reply: request.prefilled,
    ),
    "ec_transfer_params": (
        {"d" * 64: {"remote_host": "10.0.0.1", "remote_port": 1}},
        lambda request, reply: not request.prefilled,  # the prompt has no such picture
    ),
    "return_token_ids": (True, lambda request, reply: "token_ids" in reply.json()["choices"][0]),
    "response_format": ({"type": "json_object"}, formed("json_object", True)),
    "structured_outputs": ({"regex": "a"}, formed("regex", "a")),
    "guided_json": (SCHEMA, formed("json", SCHEMA)),
    "guided_json_object": (True, formed("json_object", True)),
    "guided_regex": ("a", formed("regex", "a")),
    "guided_choice": (["a"], formed("choice", ["a"])),
    "guided_grammar": ('root ::= "a"', formed("grammar", 'root ::= "a"')),
}
CHAT: dict[str, tuple[Any, Effect]] = {
    "messages": (
        [{"role": "user", "content": "other"}],
        lambda request, reply: len(request.prompt_token_ids) != LENGTH[0],
    ),
    "max_completion_tokens": (3, sampled("max_tokens", 3)),
    "logprobs": (True, sampled("logprobs", 0)),
    "tools": ([TOOL], lambda request, reply: len(request.prompt_token_ids) > LENGTH[0]),
    "add_generation_prompt": (
        False,
        lambda request, reply: len(request.prompt_token_ids) < LENGTH[0],
    ),
    "add_special_tokens": (
        True,
        lambda request, reply: len(request.prompt_token_ids) == LENGTH[0] + 1,
    ),
    "reasoning_effort": ("none", lambda request, reply: reply.status == 200),
    "include_reasoning": (False, lambda request, reply: reply.status == 200),
}
COMPLETION: dict[str, tuple[Any, Effect]] = {
    "prompt": ("other", lambda request, reply: len(request.prompt_token_ids) != LENGTH[0]),
    "echo": (True, lambda request, reply: reply.json()["choices"][0]["text"].startswith("hello")),
    "logprobs": (1, sampled("logprobs", 1)),
    "add_special_tokens": (False, lambda request, reply: reply.status == 200),
}
#: Those that only mean something beside others, and the test that shows it.
ELSEWHERE = {
    "stream_options": "test_chat.py",
    "truncation_side": "test_completions.py",
    "logprob_token_ids": "test_completions.py",
    "return_tokens_as_token_ids": "test_completions.py",
    "top_logprobs": "test_chat.py",
    "echo": "test_chat.py",
    "continue_final_message": "test_chat.py",
    "chat_template": "test_bad_requests.py",
    "chat_template_kwargs": "test_reasoning.py",
    "documents": "test_every_field.py",
    "tool_choice": "test_structured_fields.py",
    "parallel_tool_calls": "test_chat_tools.py",
    "thinking_token_budget": "test_reasoning.py",
    "guided_whitespace_pattern": "test_structured_fields.py",
    "guided_decoding_backend": "test_structured_fields.py",
    "suffix": "test_completions.py",
    "forced_bos_token_id": "test_completions.py",
    "prompt_embeds": "test_prompt_embeds.py",
    "store": "test_stored_completions.py",
    "media_io_kwargs": "test_media_sources.py",
    "mm_processor_kwargs": "test_media_sources.py",
}
#: What vLLM's and OpenAI's manuals name, from the inventory.
MANUAL = """
model messages prompt n best_of stream stream_options temperature top_p top_k min_p
presence_penalty frequency_penalty repetition_penalty repetition_detection seed stop
stop_token_ids bad_words logit_bias allowed_token_ids ignore_eos max_tokens
max_completion_tokens min_tokens logprobs top_logprobs echo prompt_logprobs skip_special_tokens
truncation_side logprob_token_ids
spaces_between_special_tokens include_stop_str_in_output suffix truncate_prompt_tokens priority
service_tier metadata store user cache_salt return_token_ids return_tokens_as_token_ids
response_format structured_outputs guided_json guided_regex guided_choice guided_grammar
guided_json_object guided_decoding_backend guided_whitespace_pattern tools tool_choice
parallel_tool_calls functions function_call add_generation_prompt continue_final_message
documents add_special_tokens chat_template chat_template_kwargs reasoning_effort
include_reasoning thinking_token_budget use_beam_search length_penalty early_stopping
logits_processors prompt_embeds mm_processor_kwargs media_io_kwargs kv_transfer_params
ec_transfer_params
modalities audio prediction web_search_options verbosity moderation
"""
NAMESPACE: list[str] = []
LENGTH: list[int] = []


async def check(gateway: Gateway, tokenizer: Tokenizer, path: str, table: Any) -> None:
    NAMESPACE.clear()
    LENGTH.clear()
    replica = gateway.scripted(says(tokenizer, "a word"))
    async with gateway.serving(replica):
        base = {"prompt": "hello one two three"} if path == "complete" else {}
        send = getattr(gateway.client, path)
        await send(**base)
        NAMESPACE.append(replica.received[0].cache_namespace)
        LENGTH.append(len(replica.received[0].prompt_token_ids))
        for name, (value, effect) in table.items():
            reply = await send(**(base | {name: value}))
            assert reply.status == 200, (name, reply.body)
            assert "x-quire-ignored-fields" not in reply.headers, name
            assert effect(replica.received[-1], reply), name


async def test_each_field_of_a_chat_has_its_effect(gateway: Gateway, tokenizer: Tokenizer) -> None:
    await check(gateway, tokenizer, "chat", BOTH | CHAT)


async def test_each_field_of_a_completion_has_its_effect(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    await check(gateway, tokenizer, "complete", BOTH | COMPLETION)


def test_the_tables_are_complete() -> None:
    registered_names = BOTH.keys() | CHAT.keys() | COMPLETION.keys() | ELSEWHERE.keys()
    assert set(MANUAL.split()) <= registered_names | UNSUPPORTED.keys() | IGNORED_HINTS.keys()
    fields = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    assert fields <= registered_names
    assert not fields & UNSUPPORTED.keys()
    for name, file in ELSEWHERE.items():
        assert name in (Path(__file__).parent / file).read_text(encoding="utf-8"), name


async def test_documents_reach_templates_that_read_them(
    gateway: Gateway, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    template = "{% for d in documents or [] %}{{ d.title }}: {{ d.text }}{% endfor %}!"
    folder = with_template(gateway.model_folder, tmp_path, template)
    replica = gateway.scripted(says(tokenizer, "x"), model_path=folder)
    async with gateway.serving(replica):
        await gateway.client.chat(documents=[{"title": "one", "text": "two"}])
        await gateway.client.chat()
    texts = [tokenizer.decode(request.prompt_token_ids) for request in replica.received]
    assert texts == ["one: two!", "!"]


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_what_is_not_supported_is_refused_by_name(served: Gateway, path: str) -> None:
    for name in UNSUPPORTED:
        reply = await getattr(served.client, path)(**{name: {"any": "thing"}})
        assert (reply.status, reply.error["param"]) == (400, name), name
        assert reply.error["code"] == "unsupported_parameter"


async def test_service_tiers_keep_to_the_keys_right(gateway: Gateway, tokenizer: Tokenizer) -> None:
    replica = gateway.scripted(says(tokenizer, "x"))
    async with gateway.serving(replica):
        tiers = [
            (await gateway.client.chat(service_tier=tier)).json()["service_tier"]
            for tier in ("auto", "default", "flex", "priority")
        ]
        invalid_outputs = await gateway.client.chat(service_tier="gold")
    assert tiers == ["default", "default", "flex", "default"]
    assert [request.priority for request in replica.received] == [0, 0, 10, 0]
    assert (invalid_outputs.status, invalid_outputs.error["param"]) == (400, "service_tier")


async def test_metadata_is_bounded(served: Gateway) -> None:
    for metadata in ({"a": 1}, {"a": "x" * 513}, {"x" * 65: "a"}, {str(i): "" for i in range(17)}):
        reply = await served.client.chat(metadata=metadata)
        assert reply.status == 400
        assert str(reply.error["param"]).startswith("metadata")
