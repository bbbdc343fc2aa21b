"""The kinds of requests, and what every response to one must have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

#: How a response is requested.
STREAM, UNSTREAMED, BATCH, BACKGROUND = "stream", "whole", "batch", "background"
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES = "/v1/responses"
#: Name of the instance's pooling model.
POOLING_MODEL = "chaos-pooling"
#: The demo's adapters: the alias that requests name, and the adapter that it is switched to.
ADAPTER, OTHER_ADAPTER = "pirate", "butler"
#: Number of lines in a batch.
LINES = 4

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 6},
        "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 12, "maxItems": 16},
    },
    "required": ["name", "tags", "ages"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "store", "parameters": SCHEMA}}
CHOICE = {"type": "function", "function": {"name": "store"}}


@dataclass(frozen=True)
class Kind:
    """One kind of request.

    Attributes:
        how: `STREAM`, `UNSTREAMED`, `BATCH` or `BACKGROUND`.
        fields: fields besides model, messages, length and randomness.
        has: attribute of a choice that is never empty: text, unless the kind tests another one.
        stops: a stop string from the unconstrained answer ends the output.
    """

    how: str
    path: str = CHAT
    fields: Mapping[str, Any] = field(default_factory=dict)
    adapter: str = ""
    has: str = "text"
    stops: bool = False


KINDS: dict[str, Kind] = {
    "plain": Kind(STREAM, fields={"ignore_eos": True}),
    "whole": Kind(UNSTREAMED, fields={"ignore_eos": True}),
    "n > 1": Kind(STREAM, fields={"ignore_eos": True, "n": 3}),
    "grammar": Kind(STREAM, fields={"response_format": FORMAT}),
    "tools": Kind(STREAM, fields={"tools": [TOOL], "tool_choice": CHOICE}, has="calls"),
    "thinking": Kind(
        STREAM,
        fields={"ignore_eos": True, "thinking_token_budget": 40, "continue_final_message": True}
        | {"add_generation_prompt": False},
        has="reasoning",
    ),
    "logprobs": Kind(
        STREAM, fields={"ignore_eos": True, "logprobs": True, "top_logprobs": 3}, has="logprobs"
    ),
    "stop": Kind(STREAM, fields={"ignore_eos": True}, stops=True),
    "penalties": Kind(
        STREAM,
        fields={"ignore_eos": True, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
        | {"logit_bias": {"300": 1.5, "301": -100}, "min_p": 0.02}
        | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "adapter": Kind(STREAM, fields={"ignore_eos": True}, adapter=ADAPTER),
    "pooling": Kind(UNSTREAMED, EMBEDDINGS),
    "batch": Kind(BATCH, fields={"ignore_eos": True}),
    "background": Kind(BACKGROUND, RESPONSES),
}

#: Kinds that are requested while replicas are killed.
UNDER_KILLS = frozenset({"stop", "penalties"})


@dataclass(frozen=True)
class Asked:
    """One request, whose response is the same whatever fault occurs.

    Attributes:
        kind: its name in `KINDS`. number: number of the variant.
    """

    kind: str
    number: int
    body: dict[str, Any]

    @property
    def about(self) -> Kind:
        """Its kind."""
        return KINDS[self.kind]


def asked_of(kind: str, number: int, model: str, max_tokens: int) -> Asked:
    """Return variant `number` of a kind: even ones are greedy, odd ones sampled with a seed."""
    about = KINDS[kind]
    question = f"Tell me story {number} of {kind}."
    if about.path == EMBEDDINGS:
        texts = [f"{question} And line {line}." for line in range(8)]
        return Asked(kind, number, {"model": POOLING_MODEL, "input": texts})
    drawn = {"temperature": 1, "seed": number} if number % 2 else {"temperature": 0}
    name = f"{model}:{about.adapter}" if about.adapter else model
    body: dict[str, Any] = {"model": name, **drawn, **about.fields}
    if about.how == BACKGROUND:
        body |= {"input": question, "background": True, "max_output_tokens": max_tokens}
        return Asked(kind, number, body)
    messages = [{"role": "user", "content": question}]
    if "continue_final_message" in about.fields:
        messages.append({"role": "assistant", "content": "<think>"})
    body |= {"messages": messages, "max_tokens": max_tokens}
    if about.how == STREAM:
        body = {"stream_options": {"include_usage": True}} | body | {"stream": True}
    return Asked(kind, number, body)


def stopping(asked: Asked, text: str, size: int = 16) -> Asked:
    """Return the request with a stop string from `text`, its answer without one.

    The first occurrence of the string is in the second half if possible, else as late as possible.
    """
    half = len(text) // 2
    offsets = [*range(half, len(text) - size), *reversed(range(1, half)), 0]
    stop = next(
        text[offset : offset + size]
        for offset in offsets
        if text.find(text[offset : offset + size]) == offset
    )
    return replace(asked, body={**asked.body, "stop": ["zqx zqx", stop]})
