"""A chat completion as one body, or as a stream of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from inference.chat.job import ChatOptions
from inference.chat.turn import ChatSession, TurnDelta, build_message
from inference.generation.logprobs import (
    best_outputs,
    chat_logprobs,
    prompt_logprobs,
    text_entries,
)
from inference.generation.output import TokenEntry
from inference.generation.record import response_metrics
from inference.parsers.state_machine import Part
from inference.serving.kv_transfer import ec_transfer_params, kv_transfer_params
from inference.serving.stream import DONE, ChunkEncoder, EventWriter

#: Fields that a message always has, as in vLLM: clients read them without checking.
OMITTED_WHEN_EMPTY: dict[str, Any] = {
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "tool_calls": [],
    "reasoning": None,
    "reasoning_content": None,
}


@dataclass(slots=True)
class _Output:
    """One output, collected."""

    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatCompletionBuilder:
    """Collects deltas; `body` is OpenAI's object."""

    def __init__(self, turn: ChatSession) -> None:
        self._session, self._options = turn, turn.options
        self._outputs = [[_Output() for _ in outputs] for outputs in turn.generation.outputs]
        self._prompt_logprobs: dict[int, Any] = {}

    def append(self, delta: TurnDelta) -> None:
        """Add new parts and tokens."""
        increment = delta.increment
        output = self._outputs[increment.number][delta.index]
        output.parts += delta.parts
        output.token_ids += increment.token_ids
        output.entries += increment.entries
        output.finish_reason, output.stop_reason = delta.finish_reason, increment.stop_reason
        if increment.prompt_logprobs is not None:
            self._prompt_logprobs[increment.number] = increment.prompt_logprobs

    def body(self) -> dict[str, Any]:
        """The `chat.completion` object."""
        generation, job = self._session.generation, self._session.job
        body: dict[str, Any] = {
            "id": job.request_id,
            "object": "chat.completion",
            "created": int(job.started_at),
            "model": job.model.name,
            "choices": self._choices(),
            "usage": generation.usage.to_openai(),
            "service_tier": self._options.service_tier,
            "system_fingerprint": job.model.fingerprint,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "kv_transfer_params": kv_transfer_params(generation),
            "ec_transfer_params": ec_transfer_params(generation),
        }
        body |= response_metrics(generation.flights)
        if self._options.metadata is not None:
            body["metadata"] = self._options.metadata
        if job.sampling.prompt_logprobs is not None:
            scores = self._prompt_logprobs.get(0)
            body["prompt_logprobs"] = prompt_logprobs(scores, self._options.names)
        if self._options.return_token_ids:
            body["prompt_token_ids"] = job.prompts[0]
        return body

    def _choices(self) -> list[dict[str, Any]]:
        """Choices of all conversations in order; only a batch has several."""
        chosen = [
            self._outputs[number][index]
            for number, outputs in enumerate(self._session.generation.outputs)
            for index in best_outputs(outputs, self._options.n)
        ]
        return [self._choice(rank, output) for rank, output in enumerate(chosen)]

    def _choice(self, index: int, output: _Output) -> dict[str, Any]:
        options = self._options
        message = {"role": options.role, **OMITTED_WHEN_EMPTY, **build_message(output.parts)}
        if options.echo_last_message:
            message["content"] = options.echo_last_message + (message["content"] or "")
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": None,
        }
        if options.top_logprobs is not None:
            choice["logprobs"] = _logprobs(output.entries, options, options.top_logprobs)
        if options.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice


def _logprobs(entries: Sequence[TokenEntry], options: ChatOptions, top: int) -> dict[str, Any]:
    visible = _visible_entries(entries, options)
    content = chat_logprobs(visible, options.names, top, asked=options.wants_tokens)
    return {"content": content, "refusal": None}


def _visible_entries(entries: Sequence[TokenEntry], options: ChatOptions) -> Sequence[TokenEntry]:
    return entries if options.shows_all_tokens else text_entries(entries)


_TEXT_PLACEHOLDER = '"\\u0000text"'
_TEXT_MARK = "\0text"
#: The field of a call that grows while it is streamed, by the kind of its parts.
_GROWS = {"arguments": ("function", "arguments"), "input": ("custom", "input")}


class ChatStreamWriter(EventWriter[TurnDelta]):
    """OpenAI's `chat.completion.chunk`s: role, text, finish reason, usage, `[DONE]`."""

    def __init__(self, turn: ChatSession) -> None:
        job, self._options = turn.job, turn.options
        self._session, options = turn, turn.options
        head = {
            "id": job.request_id,
            "object": "chat.completion.chunk",
            "created": int(job.started_at),
            "model": job.model.name,
            "service_tier": turn.options.service_tier,
            "system_fingerprint": job.model.fingerprint,
        }
        self._chunks = ChunkEncoder(
            head,
            turn.generation,
            usage=options.include_usage,
            continuous=options.continuous_usage,
        )
        # Text only: the chunk is joined from pieces that are encoded already.
        self._is_text_only = options.parsers.is_plain_text and not (
            options.return_token_ids or options.top_logprobs is not None
        )

    def start(self) -> bytes:
        """A chunk with the role for each choice, and one with the echoed message."""
        out = b""
        for index in range(self._options.n):
            first = self._opening(index, {"role": self._options.role, "content": ""})
            prompt = self._session.job.prompts[0] if self._options.return_token_ids else None
            out += self._chunks.first_chunk(first, prompt)
            if self._options.echo_last_message:
                out += self._chunks.first_chunk(
                    self._opening(index, {"content": self._options.echo_last_message})
                )
        return out

    def write(self, news: Iterable[TurnDelta]) -> bytes:
        """Chunks for new deltas."""
        return b"".join(map(self._write, news))

    def _write(self, delta: TurnDelta) -> bytes:
        increment = delta.increment
        if self._is_text_only and delta.finish_reason is None:
            return self._text(delta.index, increment.text)
        fields = message_delta(delta.parts)
        if not fields and self._shows_tokens(delta):
            fields = {"content": ""}
        if delta.finish_reason is None:
            return self._chunks.choice(self._full(delta, fields)) if fields else b""
        out = b""
        if fields:
            out += self._chunks.choice(self._full(delta, fields))
            increment.entries, increment.token_ids = [], []
        last = self._full(delta, {})
        last["finish_reason"] = delta.finish_reason
        last["stop_reason"] = increment.stop_reason
        return out + self._chunks.choice(last)

    def _text(self, index: int, text: str) -> bytes:
        return self._chunks.text(index, text, self._text_choice, _TEXT_PLACEHOLDER)

    def _text_choice(self, index: int) -> dict[str, Any]:
        return self._choice(index, {"content": _TEXT_MARK})

    def _choice(self, index: int, fields: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": index,
            "delta": fields,
            "logprobs": None,
            "finish_reason": None,
            "token_ids": None,
        }

    def _opening(self, index: int, fields: dict[str, Any]) -> dict[str, Any]:
        """A choice before any token; without token ids, not even null, for clients that collect."""
        choice = self._choice(index, fields)
        del choice["token_ids"]
        return choice

    def _full(self, delta: TurnDelta, fields: dict[str, Any]) -> dict[str, Any]:
        """A choice with the delta's tokens, as far as the client requested them."""
        options, increment = self._options, delta.increment
        choice = self._choice(delta.index, fields)
        if options.top_logprobs is not None and _visible_entries(increment.entries, options):
            choice["logprobs"] = _logprobs(increment.entries, options, options.top_logprobs)
        if options.return_token_ids:
            choice["token_ids"] = increment.token_ids
        return choice

    def _shows_tokens(self, delta: TurnDelta) -> bool:
        """Whether tokens must be written although they produced no text."""
        options, increment = self._options, delta.increment
        return bool(
            (options.top_logprobs is not None and _visible_entries(increment.entries, options))
            or (options.return_token_ids and increment.token_ids)
        )

    def finish(self) -> bytes:
        """The usage if requested, and the end marker."""
        return self._chunks.final_usage() + DONE


def message_delta(parts: Iterable[Part]) -> dict[str, Any]:
    """Parts as a chunk's `delta`, which clients append to their fields."""
    fields: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if part.kind == "content":
            fields["content"] = fields.get("content", "") + part.text
        elif part.kind == "reasoning":
            fields["reasoning"] = fields["reasoning_content"] = (
                fields.get("reasoning", "") + part.text
            )
        elif part.kind == "call":
            function = {"name": part.text, "arguments": ""}
            call = {"index": part.call, "id": part.id, "type": "function", "function": function}
            calls[part.call] = call
        elif part.kind == "custom":
            custom = {"name": part.text, "input": ""}
            calls[part.call] = {
                "index": part.call,
                "id": part.id,
                "type": "custom",
                "custom": custom,
            }
        else:
            field, name = _GROWS[part.kind]
            more = {"index": part.call, field: {name: ""}}
            calls.setdefault(part.call, more)[field][name] += part.text
    if calls:
        fields["tool_calls"] = list(calls.values())
    return fields
