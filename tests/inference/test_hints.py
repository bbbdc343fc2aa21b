"""Wishes that a model can't follow: the request goes on, and the answer names them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from tests.inference.asgi_client import Reply
from tests.inference.conftest import Gateway
from tests.inference.scripted import says
from tests.inference.tokenizer_folder import with_template

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hello"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    "/v1/completions": {"prompt": "hello"},
    RESPONSES: {"input": "hello"},
    MESSAGES: {"messages": [USER], "max_tokens": 50},
}
REDACTED = {"type": "redacted_thinking", "data": "AAAA"}


async def ask(gateway: Gateway, path: str, **fields: Any) -> Reply:
    return await gateway.client.post(path, {"model": "fake", **BODIES[path], **fields})


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"thinking_token_budget": 5}, "thinking_token_budget"),
        (CHAT, {"verbosity": "low"}, "verbosity"),
        (CHAT, {"prompt_cache_key": "k", "safety_identifier": "s"}, "prompt_cache_key, safety_"),
        ("/v1/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        (RESPONSES, {"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        (RESPONSES, {"text": {"verbosity": "high"}}, "text.verbosity"),
        (RESPONSES, {"max_tool_calls": 3}, "max_tool_calls"),
        (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
        (RESPONSES, {"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        (MESSAGES, {"output_config": {"effort": "high"}}, "output_config.effort"),
        (MESSAGES, {"output_config": {"effort": "utmost"}}, "output_config.effort"),
        (MESSAGES, {"context_management": {"edits": [{"type": "x"}]}}, "context_management"),
        (
            MESSAGES,
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
            "thinking.budget_tokens",
        ),
        (
            MESSAGES,
            {"messages": [USER, {"role": "assistant", "content": [REDACTED]}, USER]},
            "messages.1.content.0",
        ),
    ],
)
async def test_a_wish_that_nothing_can_follow_is_named(
    served: Gateway, path: str, fields: dict[str, Any], named: str, settings: Any
) -> None:
    """Whatever is strict: it's no field that isn't known."""
    for strict, stream in itertools.product((False, path != "/v1/completions"), (False, True)):
        settings.QUIRE = settings.QUIRE.replace(strict=strict)
        reply = await ask(served, path, stream=stream, **fields)
        assert reply.status == 200, reply.body
        assert reply.headers["x-quire-ignored-fields"].startswith(named)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"reasoning_effort": "none", "verbosity": "medium"}),
        (RESPONSES, {"reasoning": {"summary": "auto"}, "text": {"verbosity": "medium"}}),
        (RESPONSES, {"context_management": [], "prompt_cache_retention": "in_memory"}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
    ],
)
async def test_a_wish_for_nothing_is_not(
    served: Gateway, path: str, fields: dict[str, Any]
) -> None:
    reply = await ask(served, path, **fields)
    assert reply.status == 200, reply.body
    assert "x-quire-ignored-fields" not in reply.headers


async def test_strict_mode_refuses_only_what_nobody_knows(served: Gateway, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(strict=True)
    reply = await ask(served, CHAT, verbosity="low", verbostiy="low")
    assert (reply.status, reply.error["param"]) == (400, "verbostiy")


FIRST = "{% if messages[1:] | selectattr('role', 'equalto', 'system') | list %}"
FIRST += "{{ raise_exception('The system message must come first.') }}{% endif %}"
TURNS_TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
LATE = [USER, {"role": "system", "content": "be brief"}, {"role": "user", "content": "now"}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TURNS_TEMPLATE, "user:hello;system:be brief;user:now;"),
        (FIRST + TURNS_TEMPLATE, "user:hello\n\nbe brief\n\nnow;"),
    ],
)
async def test_a_late_system_message_stays_where_the_template_takes_it(
    gateway: Gateway, tokenizer: Tokenizer, tmp_path: Any, template: str, expected: str
) -> None:
    folder = with_template(gateway.model_folder, tmp_path, template)
    replica = gateway.scripted(says(tokenizer, "x"), model_path=folder)
    async with gateway.serving(replica):
        await ask(gateway, MESSAGES, messages=LATE)
        await ask(gateway, RESPONSES, input=LATE)
        chat = await ask(gateway, CHAT, messages=LATE)
    texts = [tokenizer.decode(request.prompt_token_ids) for request in replica.received[:2]]
    assert texts == [expected] * 2
    assert chat.status == (200 if template == TURNS_TEMPLATE else 400)
