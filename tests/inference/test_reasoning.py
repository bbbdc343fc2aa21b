"""Reasoning models through the gateway: fields, budgets, and forms after the reasoning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.contract.sampling_params import ReasoningParams
from engine.text.tokenizer import Tokenizer
from inference.chat.reasoning import BUDGETS
from tests.inference.conftest import Gateway
from tests.inference.scripted import ScriptedReplica, byte_by_byte
from tests.inference.test_chat_tools import CALL, TOOL, assembled
from tests.inference.tokenizer_folder import with_template

BASE = (
    "{% if tools %}tools <tool_call>{% endif %}{% for m in messages %}{{ m.content }}\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
OPENED = BASE + "<think>\n"
EFFORT = BASE + "Effort: {{ reasoning_effort }}"
THOUGHT = "<think>\nHm, {a}.\n</think>\n\nYes."


@pytest.fixture
def thinker(gateway: Gateway, tokenizer: Tokenizer, tmp_path: Path) -> Any:
    def make(text: str = THOUGHT, template: str = BASE) -> ScriptedReplica:
        copy = tmp_path / str(len(list(tmp_path.iterdir())))
        copy.mkdir()
        folder = with_template(gateway.model_folder, copy, template)
        return gateway.scripted(byte_by_byte(tokenizer, text), model_path=folder)

    return make


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


async def test_reasoning_has_a_field_of_its_own(gateway: Gateway, thinker: Any) -> None:
    async with gateway.serving(thinker()):
        full_outputs = await gateway.client.chat()
        stream = await gateway.client.chat(stream=True)
        without = await gateway.client.chat(include_reasoning=False)
        stream_without = await gateway.client.chat(include_reasoning=False, stream=True)
    message = full_outputs.json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm, {a}.", "Yes.")
    assert message["reasoning_content"] == message["reasoning"]
    deltas = [choice["delta"] for event in stream.events[:-1] for choice in event["choices"]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm, {a}."
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    hidden = without.json()["choices"][0]["message"]
    assert (hidden["content"], hidden["reasoning"], hidden["reasoning_content"]) == (
        "Yes.",
        None,
        None,
    )
    assert assembled(stream_without.events)[0] == "Yes."
    assert b"reasoning" not in stream_without.body
    for usage in (full_outputs.json()["usage"], without.json()["usage"]):
        tokens = usage["completion_tokens_details"]["reasoning_tokens"]
        assert tokens == len("<think>\nHm, {a}.\n</think>")  # a token a byte
        assert usage["completion_tokens"] == len(THOUGHT) + 1


async def test_a_prompt_may_have_opened_or_closed_the_reasoning(
    gateway: Gateway, thinker: Any
) -> None:
    async with gateway.serving(thinker("Hm.</think>Yes.", OPENED)):
        opened = (await gateway.client.chat()).json()["choices"][0]["message"]
        assert (opened["reasoning"], opened["content"]) == ("Hm.", "Yes.")
    async with gateway.serving(thinker("Yes.", BASE)):
        fields = {"chat_template_kwargs": {"enable_thinking": False}}
        closed = (await gateway.client.chat(**fields)).json()["choices"][0]["message"]
        assert closed["content"] == "Yes."
        assert closed["reasoning"] is None


async def test_a_form_waits_for_the_reasonings_end(
    gateway: Gateway, thinker: Any, tokenizer: Tokenizer
) -> None:
    form = {"response_format": {"type": "json_object"}}
    end = [ids(tokenizer, "</think>"), ids(tokenizer, " </think>"), ids(tokenizer, "\n</think>")]
    async with gateway.serving(replica := thinker()):
        await gateway.client.chat()
        await gateway.client.chat(**form)
        await gateway.client.chat(**form, thinking_token_budget=7)
        await gateway.client.chat(**form, reasoning_effort="none")
        await gateway.client.chat(thinking_token_budget=0)
    free, formed, bounded, off, zero = (request.sampling.thinking for request in replica.received)
    assert free is None
    assert isinstance(formed, ReasoningParams)
    assert formed.start == ids(tokenizer, "<think>")
    assert formed.close == ids(tokenizer, "</think>")
    assert formed.end[0] == end[0]
    assert formed.budget is None
    assert bounded.budget == 7
    assert off is None  # the prompt has closed it
    assert zero.budget == 0
    async with gateway.serving(replica := thinker("Hm.</think>{}", OPENED)):
        await gateway.client.chat(**form)
    assert replica.received[0].sampling.thinking.start == []


async def test_a_rendered_chat_tells_of_its_reasoning(gateway: Gateway, thinker: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "thinking_token_budget": 7}
    chat |= {"response_format": {"type": "json_object"}}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    async with gateway.serving(replica := thinker()):
        await gateway.client.post("/v1/chat/completions", chat)
        bodies = [
            (await gateway.client.post("/v1/chat/completions/render", chat | more)).json()
            for more in ({}, off)
        ]
        for body in (*bodies, bodies[0] | {"reasoning_ended": True}):
            assert (await gateway.client.post("/inference/v1/generate", body)).status == 200
    assert [body["reasoning_ended"] for body in bodies] == [False, True]
    meant, ran, past, finished = (request.sampling.thinking for request in replica.received)
    assert ran == meant
    assert meant.budget == 7
    assert past is finished is None


async def test_an_effort_is_the_templates_or_a_budget(gateway: Gateway, thinker: Any) -> None:
    async with gateway.serving(replica := thinker()):
        for effort in BUDGETS:
            assert (await gateway.client.chat(reasoning_effort=effort)).status == 200
        invalid_outputs = await gateway.client.chat(reasoning_effort="extreme")
        assert (invalid_outputs.status, invalid_outputs.error["param"]) == (400, "reasoning_effort")
    thinkings = [request.sampling.thinking for request in replica.received]
    assert [thinking.budget if thinking else None for thinking in thinkings] == [
        *(None, 512, 1024, 8192),
        *(None, None, None),
    ]


async def test_templates_get_the_effort_that_they_ask_for(
    gateway: Gateway, thinker: Any, tokenizer: Tokenizer
) -> None:
    async with gateway.serving(replica := thinker(template=EFFORT)):
        await gateway.client.chat(reasoning_effort="high")
    assert tokenizer.decode(replica.received[0].prompt_token_ids).endswith("Effort: high")
    assert replica.received[0].sampling.thinking is None


async def test_wrong_budgets_are_refused(served: Gateway) -> None:
    for value in (-1, 2**31, True, "5"):
        reply = await served.client.chat(thinking_token_budget=value)
        assert (reply.status, reply.error["param"]) == (400, "thinking_token_budget")


async def test_a_call_after_the_reasoning(gateway: Gateway, thinker: Any) -> None:
    async with gateway.serving(thinker(f"<think>Hm.</think>\n{CALL}")):
        reply = await gateway.client.chat(tools=[TOOL])
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Hm.", None)
    assert len(choice["message"]["tool_calls"]) == 1


async def test_a_call_that_ends_the_reasoning_by_itself(gateway: Gateway, thinker: Any) -> None:
    async with gateway.serving(thinker(f"<think>Hm.\n{CALL}")):
        reply = await gateway.client.chat(tools=[TOOL])
        stream = await gateway.client.chat(tools=[TOOL], stream=True)
    choice = reply.json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["reasoning"]) == ("tool_calls", "Hm.")
    assert len(choice["message"]["tool_calls"]) == 1
    assert b'"tool_calls"' in stream.body


async def test_a_templates_switch_tells_where_its_prompt_does_not(
    gateway: Gateway, thinker: Any
) -> None:
    replica = thinker(
        "Hm.</think>Yes.", "{{ messages[0].content }}{% if enable_thinking %} {% endif %}"
    )
    replica.model.reasoning_parser = "glm45"
    form = {"response_format": {"type": "json_object"}}
    async with gateway.serving(replica):
        seen = []
        for variables in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
            chat = {"chat_template_kwargs": variables} | form
            message = (await gateway.client.chat(**chat)).json()["choices"][0]["message"]
            seen.append((message["reasoning"], message["content"]))
    assert seen == [("Hm.", "Yes."), ("Hm.", "Yes."), (None, "Hm.</think>Yes.")]
    assert [request.sampling.thinking is None for request in replica.received] == [
        False,
        False,
        True,
    ]


async def test_a_stream_that_shows_nothing_for_long_says_so(
    gateway: Gateway, thinker: Any, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(sse_heartbeat_s=0.01)
    replica = thinker(f"<think>{'hm ' * 20}</think>Yes.")
    replica.token_delay = 0.005
    async with gateway.serving(replica):
        stream = await gateway.client.chat(stream=True, include_reasoning=False)
    initial, _, _ = stream.body.partition(b"Yes")
    assert initial.count(b": keep-alive") > 3
