"""The response object, in one body and as a stream of numbered events."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from engine.contract.errors import QuireError
from inference.api.responses.event_store import encode_event
from inference.api.responses.output_items import (
    DeliveredItemFilter,
    Event,
    Output,
    ResumeMismatch,
    items_from_events,
)
from inference.api.responses.schemas import ResponsesRequest, split_names
from inference.chat.turn import ChatSession, TurnDelta
from inference.errors import RequestAborted
from inference.generation.logprobs import chat_logprobs, text_entries
from inference.request.job import Usage
from inference.serving.respond import usage_object
from inference.serving.stream import EventWriter

#: Default fields of a tool that clients expect even if they weren't sent.
_TOOL_DEFAULTS: dict[str, dict[str, Any]] = {
    "function": {"description": None, "parameters": None, "strict": None},
    "custom": {"description": None, "format": {"type": "text"}},
    "namespace": {"description": ""},
}


def response_object(
    request: ResponsesRequest, public_id: str, created: float, model: str = ""
) -> dict[str, Any]:
    """OpenAI's `response` before anything is generated."""
    text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
    reasoning = request.reasoning
    return {
        "id": public_id,
        "object": "response",
        "created_at": int(created),
        "completed_at": None,
        "conversation": {"id": request.conversation_id} if request.conversation_id else None,
        "status": "in_progress",
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "model": model or request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": request.tool_choice or "auto",
        "tools": [
            _TOOL_DEFAULTS.get(tool.type, {}) | tool.model_dump(exclude_unset=True)
            for tool in request.tools or ()
        ],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
    }


def response_usage(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage` of a response."""
    body = usage_object(
        {
            "input": usage.prompt_tokens,
            "cached": usage.cached_tokens,
            "output": usage.completion_tokens,
            "reasoning": usage.reasoning_tokens or 0,
        }
    )
    body["input_tokens_details"] |= {"cache_write_tokens": 0} | usage.media_fields()
    return body | usage.detail_fields()


class ResponseAnswer:
    """Collects deltas into a response."""

    def __init__(
        self,
        turn: ChatSession,
        request: ResponsesRequest,
        public_id: str,
        *,
        created_at: int | None = None,
    ) -> None:
        self._session = turn
        self._output = Output(public_id, split_names(request.tools))
        self._delivered: DeliveredItemFilter | None = None
        created = turn.job.started_at if created_at is None else created_at
        self._body = response_object(request, public_id, created, turn.job.model.name)
        self._body["service_tier"] = turn.options.service_tier or "default"
        self._reason: str | None = None

    @property
    def started(self) -> dict[str, Any]:
        """The response without any output."""
        return dict(self._body)

    def go_on_from(self, events: list[Event]) -> bool:
        """Continue from another worker's events; False if they contain no output yet.

        Raises: `ResumeMismatch` for log probabilities, which can't be matched.
        """
        items = items_from_events(events)
        if items:
            if self._session.options.top_logprobs is not None:
                raise ResumeMismatch(
                    "Another worker can't continue an answer with log probabilities."
                )
            self._output.go_on_from(items)
            self._delivered = DeliveredItemFilter(items)
        return any(event["type"] == "response.in_progress" for event in events)

    def append(self, delta: TurnDelta) -> list[Event]:
        """Add a delta; return its events."""
        if delta.finish_reason == "abort":
            raise RequestAborted("An operator has aborted this request.")
        options, entries = self._session.options, delta.increment.entries
        logprobs: list[dict[str, Any]] = []
        if options.top_logprobs is not None and entries:
            visible_entries = entries if options.shows_all_tokens else text_entries(entries)
            logprobs = chat_logprobs(visible_entries, options.names, options.top_logprobs)
        self._reason = delta.finish_reason or self._reason
        parts = (
            delta.parts if self._delivered is None else self._delivered.skip_delivered(delta.parts)
        )
        return self._output.append(parts, logprobs)

    def add(self, delta: TurnDelta) -> None:
        """Add a delta without returning its events."""
        self.append(delta)

    def finish(self) -> list[Event]:
        """Close open items."""
        return self._output.end("incomplete" if self._reason == "length" else "completed")

    def body(self) -> dict[str, Any]:
        if any(item["status"] == "in_progress" for item in self._output.items) or not (
            self._output.items
        ):
            self.finish()
        short = self._reason == "length"
        return {
            **self._body,
            "status": "incomplete" if short else "completed",
            "completed_at": int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if short else None,
            "output": self._output.items,
            "usage": response_usage(self._session.usage),
        }

    def failed(self, error: QuireError) -> dict[str, Any]:
        """The response after an error in the middle."""
        return failed_response({**self._body, "output": self._output.items}, error)


def failed_response(body: dict[str, Any], error: QuireError) -> dict[str, Any]:
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    code = "invalid_prompt" if error.status in (400, 404) else code
    return {**body, "status": "failed", "error": {"code": code, "message": error.message}}


class ResponseStreamWriter(EventWriter[TurnDelta]):
    """OpenAI's numbered events.

    Attributes:
        final: the complete response once the last event is written, to be stored before it is sent.
    """

    def __init__(self, turn: ChatSession, request: ResponsesRequest, public_id: str) -> None:
        self._answer = ResponseAnswer(turn, request, public_id)
        self._number = 0
        self.final: dict[str, Any] | None = None

    def start(self) -> bytes:
        """The events that the response was created and is in progress."""
        started = self._answer.started
        return self._event({"type": "response.created", "response": started}) + self._event(
            {"type": "response.in_progress", "response": started}
        )

    def write(self, news: Iterable[TurnDelta]) -> bytes:
        """Events for new deltas."""
        events = [event for delta in news for event in self._answer.append(delta)]
        return b"".join(map(self._event, events))

    def finish(self) -> bytes:
        """Close open items; return the events and the complete response."""
        out = b"".join(map(self._event, self._answer.finish()))
        self.final = self._answer.body()
        kind = f"response.{self.final['status']}"
        return out + self._event({"type": kind, "response": self.final})

    def assign_ids(self, events: int) -> None:
        """Continue with this number."""
        self._number = events

    def error(self, error: QuireError) -> bytes:
        """The event that the response failed."""
        self.final = self._answer.failed(error)
        return self._event({"type": "response.failed", "response": self.final})

    def _event(self, event: Event) -> bytes:
        number, self._number = self._number, self._number + 1
        return encode_event(number, event)
