"""Reasoning budgets, and the markers by which the engine separates reasoning from the answer."""

from __future__ import annotations

from typing import Any

from django.conf import settings

from engine.contract.sampling_params import ReasoningParams
from engine.text.tokenizer import Tokenizer
from inference.chat.parsers import ModelParsers
from inference.parsers.reasoning_parser import ReasoningMarkers, ReasoningParser
from inference.schemas.chat import ChatRequest

#: Token budgets of `reasoning_effort` for models whose templates don't know it; None: no limit.
BUDGETS: dict[str, int | None] = {
    "none": 0,
    "minimal": 512,
    "low": 1024,
    "medium": 8192,
    "high": None,
    "xhigh": None,
    "max": None,
}
#: Names of the variable that turns reasoning on or off in chat templates.
_SWITCHES = ("enable_thinking", "thinking")
#: Tokens at a prompt's end that are searched for the start of the reasoning.
TAIL_TOKENS = 32
#: The same for a prompt that ends inside a message.
OPEN_TAIL_TOKENS = 4096


def unsupported_reasoning_fields(
    chat: ChatRequest, template: str, reasoning: type[ReasoningParser] | None
) -> tuple[str, ...]:
    """Fields about reasoning that a model without reasoning doesn't support."""
    if reasoning is not None:
        return ()
    effort = chat.reasoning_effort
    names = []
    if effort not in (None, "none") and "reasoning_effort" not in template:
        names.append("reasoning_effort")
    if chat.thinking_token_budget is not None:
        names.append("thinking_token_budget")
    return tuple(names)


def template_variables(chat: ChatRequest, template: str) -> dict[str, Any]:
    """Variables for the chat template: the operator's, what `reasoning_effort` sets, the chat's."""
    return {
        **settings.QUIRE.default_chat_template_kwargs,
        **_switches(chat, chat.chat_template or template),
        **(chat.chat_template_kwargs or {}),
    }


def _switches(chat: ChatRequest, template: str) -> dict[str, Any]:
    """Variables for the chat template that `reasoning_effort` sets."""
    effort = chat.reasoning_effort
    if effort is None:
        return {}
    switches: dict[str, Any] = {}
    if effort == "none":
        switches = {name: False for name in _SWITCHES if name in template}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort, **switches}
    return switches


def prompt_opens_reasoning(
    chat: ChatRequest, parser: type[ReasoningParser], tokenizer: Tokenizer, prompt: list[int]
) -> bool | None:
    """Whether a prompt ends inside the reasoning; None if unknown.

    The prompt's end decides first, then the variables that its template knows.
    """
    if not chat.continue_final_message:
        opens = parser.prompt_opens_reasoning(tokenizer.decode(prompt[-TAIL_TOKENS:], False))
        return (
            _reasoning_switch(chat, parser, tokenizer.chat_template or "")
            if opens is None
            else opens
        )
    text = tokenizer.decode(prompt[-OPEN_TAIL_TOKENS:], False)
    last_start = max((text.rfind(mark) for mark in parser.starts), default=-1)
    return last_start > max((text.rfind(mark) for mark in parser.ends), default=-1)


def _reasoning_switch(
    chat: ChatRequest, parser: type[ReasoningParser], template: str
) -> bool | None:
    """Whether reasoning is off (False), or on in a way that opens the reasoning (True)."""
    variables = template_variables(chat, template)
    template_values = {name: value for name, value in variables.items() if name in template}
    on = parser.switched(template_values)
    return None if on and not parser.template_opens else on


def thinking_params(
    chat: ChatRequest,
    parsers: ModelParsers,
    tokenizer: Tokenizer,
    *,
    in_reasoning: bool | None,
    constrained: bool,
    calls: bool,
    template: str,
) -> ReasoningParams | None:
    """Reasoning parameters for the engine; None if it needs none.

    Args:
        in_reasoning: whether the prompt ends inside the reasoning.
        constrained: the answer has a constrained format, which only applies after the reasoning.
        calls: whether that format may be one of calls.
    """
    budget, parser = _budget(chat, template), parsers.reasoning
    if parser is None:
        return None
    if in_reasoning is False or (budget is None and not constrained):
        return None
    marks = parser.marks(constrained=constrained, calls=calls)
    return _token_marks(parser, marks, tokenizer, in_reasoning, budget)


def reasoning_counter(
    parser: type[ReasoningParser], tokenizer: Tokenizer, in_reasoning: bool | None
) -> ReasoningParams | None:
    """Counter of reasoning tokens; None if the prompt has ended the reasoning."""
    if in_reasoning is False:
        return None
    marks = parser.marks(constrained=False, calls=False)
    return _token_marks(parser, marks, tokenizer, in_reasoning, None)


def _token_marks(
    parser: type[ReasoningParser],
    marks: ReasoningMarkers,
    tokenizer: Tokenizer,
    in_reasoning: bool | None,
    budget: int | None,
) -> ReasoningParams:
    assumed = parser.starts_in_reasoning if in_reasoning is None else in_reasoning
    return ReasoningParams(
        end=[ids for text in marks.ends for ids in _mark_token_ids(tokenizer, text)],
        start=[] if assumed or not marks.start else _ids(tokenizer, marks.start),
        close=_ids(tokenizer, marks.close),
        budget=budget,
    )


def _budget(chat: ChatRequest, template: str) -> int | None:
    if chat.thinking_token_budget is not None:
        return chat.thinking_token_budget
    if chat.reasoning_effort is None or "reasoning_effort" in template:
        return None
    return BUDGETS[chat.reasoning_effort]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _mark_token_ids(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    """A marker's tokens. One made of ordinary words has other tokens after a space or newline."""
    first = _ids(tokenizer, text)
    if len(first) == 1:
        return [first]
    variants = [_ids(tokenizer, f" {text}"), _ids(tokenizer, f"\n{text}")]
    return [first, *(ids for ids in variants if ids[-len(first) :] != first)]
