"""Anthropic's `message`, in one body and as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from engine.contract.errors import QuireError
from inference.api.anthropic.errors import error_object
from inference.chat.turn import ChatSession, TurnDelta
from inference.errors import RequestAborted
from inference.parsers.state_machine import Part
from inference.serving.stream import EventWriter

_encode = msgspec.json.Encoder().encode
Event = dict[str, Any]
ThinkingDisplay = Literal["all", "blocks", "none"]
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
KINDS = {"content": "text", "reasoning": "thinking"}


class MessageBuilder:
    """Builds the message; methods return the resulting events.

    Args:
        shown: how much of the model's reasoning the client sees: "all", "none", or "blocks" (empty
            blocks).
    """

    def __init__(self, turn: ChatSession, *, display: ThinkingDisplay) -> None:
        self._turn, self._display = turn, display
        self._content: list[dict[str, Any]] = []
        self._arguments = ""
        self._is_open = False
        self._finish_reason: str | None = None
        self._stop: int | str | None = None

    def append(self, delta: TurnDelta) -> list[Event]:
        if delta.finish_reason == "abort":
            raise RequestAborted("An operator has aborted this request.")
        events = [event for part in delta.parts for event in self._add(part)]
        if delta.finish_reason is not None:
            self._finish_reason, self._stop = delta.finish_reason, delta.increment.stop_reason
        return events

    def add(self, delta: TurnDelta) -> None:
        """Append a delta without returning events."""
        self.append(delta)

    def _add(self, part: Part) -> list[Event]:
        if part.kind == "call":
            block = {"type": "tool_use", "id": part.id, "name": part.text, "input": {}}
            return self._begin(block)
        if part.kind == "arguments":
            self._arguments += part.text
            return [self._delta(part.text)]
        kind = KINDS[part.kind]
        if kind == "thinking" and self._display == "none":
            return []
        events = []
        if not self._is_open or self._content[-1]["type"] != kind:
            events = self._begin({"type": kind, kind: ""} | _signature(kind))
        if kind == "thinking" and self._display == "blocks":
            return events
        self._content[-1][kind] += part.text
        return [*events, self._delta(part.text)]

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        events = self.close()
        self._content.append(block)
        self._is_open, self._arguments = True, ""
        index = len(self._content) - 1
        return [*events, _event("content_block_start", index=index, content_block=dict(block))]

    def _delta(self, text: str) -> Event:
        kind, field = DELTAS[self._content[-1]["type"]]
        delta = {"type": kind, field: text}
        return _event("content_block_delta", index=len(self._content) - 1, delta=delta)

    def close(self) -> list[Event]:
        """Close the open block."""
        if not self._is_open:
            return []
        self._is_open = False
        block = self._content[-1]
        if block["type"] == "tool_use":
            block["input"] = _parse_arguments(self._arguments)
        return [_event("content_block_stop", index=len(self._content) - 1)]

    def finish(self) -> list[Event]:
        """Close open blocks. A message without blocks gets an empty text, because clients read the
        first block without checking.
        """
        events = [] if self._content else self._begin({"type": "text", "text": ""})
        return events + self.close()

    def body(self) -> dict[str, Any]:
        """The message so far."""
        self.finish()
        return {
            **self.message_start(),
            "content": self._content,
            **self.end(),
            "usage": self.usage(),
        }

    def message_start(self) -> dict[str, Any]:
        """The message before any content."""
        job = self._turn.job
        return {
            "id": job.request_id,
            "type": "message",
            "role": "assistant",
            "model": job.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(),
        }

    def end(self) -> dict[str, Any]:
        """The stop reason, for the last event."""
        has_tool_calls = any(block["type"] == "tool_use" for block in self._content)
        sequence = self._stop if isinstance(self._stop, str) else None
        reason = "end_turn"
        if self._finish_reason == "length":
            reason = "max_tokens"
        elif has_tool_calls:
            reason = "tool_use"
        elif sequence is not None:
            reason = "stop_sequence"
        return {
            "stop_reason": reason,
            "stop_sequence": sequence if reason == "stop_sequence" else None,
        }

    def usage(self) -> dict[str, Any]:
        """Token counts so far. Cached tokens aren't counted as input tokens."""
        usage = self._turn.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "service_tier": "standard",
            **usage.detail_fields(),
        }


def _signature(kind: str) -> dict[str, str]:
    """Placeholder signature: our blocks are not signed, and not verified when they come back."""
    return {"signature": ""} if kind == "thinking" else {}


def _parse_arguments(arguments: str) -> dict[str, Any]:
    """A call's arguments; {} if the model was cut off and left invalid JSON."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _event(kind: str, **fields: Any) -> Event:
    return {"type": kind, **fields}


def _encoded(event: Event) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + _encode(event) + b"\n\n"


class MessageStreamWriter(EventWriter[TurnDelta]):
    """Anthropic's events."""

    heartbeat = _encoded({"type": "ping"})

    def __init__(self, turn: ChatSession, request_id: str, *, display: ThinkingDisplay) -> None:
        self._message = MessageBuilder(turn, display=display)
        self._request_id = request_id

    def start(self) -> bytes:
        """The message, empty: its usage is not known yet."""
        head = self._message.message_start()
        head["usage"]["output_tokens"] = 0
        return _encoded(_event("message_start", message=head)) + self.heartbeat

    def write(self, news: Iterable[TurnDelta]) -> bytes:
        """Events for new deltas."""
        return b"".join(_encoded(event) for delta in news for event in self._message.append(delta))

    def finish(self) -> bytes:
        """The end of the last block and of the message, with its stop reason."""
        events = self._message.finish()
        usage = self._message.usage()
        del usage["service_tier"]
        events.append(_event("message_delta", delta=self._message.end(), usage=usage))
        return b"".join(map(_encoded, [*events, _event("message_stop")]))

    def error(self, error: QuireError) -> bytes:
        """The error in Anthropic's envelope."""
        return _encoded(error_object(error, self._request_id))
