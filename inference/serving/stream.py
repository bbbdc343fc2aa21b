"""Event ids of a stream, and skipping events that its client already has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import msgspec

from engine.contract.errors import QuireError
from inference.errors import encode_error
from inference.generation.generation import Generation
from inference.generation.output import OutputDelta
from inference.generation.record import response_metrics
from inference.request.job import Usage
from inference.request.position import MAX_OUTPUTS, StreamPosition
from inference.web.responses import EVENT_STREAM

_encode = msgspec.json.Encoder().encode


class ChunkEncoder:
    """Encodes one stream's chunks. The usual chunk, text only, is joined from three parts."""

    def __init__(
        self, head: dict[str, Any], generation: Generation, *, usage: bool, continuous: bool
    ) -> None:
        """`head`: fields of every chunk (id, model ...). `usage`: whether chunks have `usage`."""
        self._head, self._generation = head, generation
        self._usage, self._continuous = usage, continuous
        # `{"id":...,"choices":[` with the closing brace of the head cut off.
        self._start = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._texts: dict[int, tuple[bytes, bytes]] = {}

    def choice(self, choice: dict[str, Any]) -> bytes:
        return self._start + _encode(choice) + self._usage_suffix()

    def first_chunk(
        self, choice: dict[str, Any], prompt_token_ids: list[int] | None = None
    ) -> bytes:
        """A chunk with one choice, before any token: the usage is the prompt's alone."""
        chunk: dict[str, Any] = {
            **self._head,
            "prompt_token_ids": prompt_token_ids,
            "choices": [choice],
        }
        if self._usage:
            used = Usage(prompt_tokens=self._generation.usage.prompt_tokens)
            chunk["usage"] = used.to_openai() if self._continuous else None
        return b"data: " + _encode(chunk) + b"\n\n"

    def text(
        self, index: int, text: str, template: Callable[[int], dict[str, Any]], placeholder: str
    ) -> bytes:
        """Fill the template's `placeholder` with text."""
        parts = self._texts.get(index)
        if parts is None:
            prefix, _, after = _encode(template(index)).partition(placeholder.encode())
            parts = self._texts[index] = (self._start + prefix, after)
        return parts[0] + _encode(text) + parts[1] + self._usage_suffix()

    def _usage_suffix(self) -> bytes:
        if not self._continuous:
            return self._end
        return b'],"usage":' + _encode(self._generation.usage.to_openai()) + b"}\n\n"

    def final_usage(self) -> bytes:
        """The chunk after the last choice: total usage, no choices; b"" if not requested."""
        if not self._usage:
            return b""
        usage = _encode(self._generation.usage.to_openai())
        metrics = response_metrics(self._generation.flights)
        encoded_metrics = b"," + _encode(metrics)[1:-1] if metrics else b""
        return self._start + b'],"usage":' + usage + encoded_metrics + b"}\n\n"


#: A comment without a blank line: after an event with an id, OpenAI's and Anthropic's clients take
#: a blank line for an event without data, and fail on it.
HEARTBEAT = b": keep-alive\n"
DONE = b"data: [DONE]\n\n"

N = TypeVar("N")


class EventWriter(ABC, Generic[N]):
    """Writes one endpoint's events.

    Attributes:
        heartbeat: bytes written after a while without a token.
        content_type: media type of the response.
    """

    heartbeat: bytes = HEARTBEAT
    content_type: str = EVENT_STREAM

    def start(self) -> bytes:
        """Bytes before the first token; b"" for none."""
        return b""

    @abstractmethod
    def write(self, news: Iterable[N]) -> bytes:
        """Events for new deltas; b"" for none."""

    @abstractmethod
    def finish(self) -> bytes:
        """Bytes after the last token."""

    def assign_ids(self, events: int) -> None:
        """The client has received so many events: for writers that number their events."""

    def error(self, error: QuireError) -> bytes:
        """The stream's last event when the generation failed in the middle."""
        return b"event: error\ndata: " + encode_error(error) + b"\n\n"


END = b"\n\n"


def with_event_ids(source: Any, writer: EventWriter[Any]) -> EventWriter[Any]:
    """Wrap a writer so that events have ids; the writer itself if the stream isn't resumable.

    `source`: a `Generation`, or an object with one.
    """
    generation: Generation = getattr(source, "generation", source)
    outputs = sum(map(len, generation.outputs))
    if outputs > MAX_OUTPUTS or writer.content_type != EVENT_STREAM:  # plain lines have no ids
        return writer
    return EventIdWriter(generation, writer)


class EventIdWriter(EventWriter[Any]):
    """Adds ids to the events of another writer.

    When a stream is resumed, the first deltas are those that the client already has: the writer
    processes them, and its events are dropped. See `Generation.has_delivered_tokens`.
    """

    def __init__(self, generation: Generation, writer: EventWriter[Any]) -> None:
        self._writer, self._generation = writer, generation
        self.heartbeat, self.content_type = writer.heartbeat, writer.content_type
        self._stream = generation.job.request_id.encode()
        self._choices = generation.job.sampling.num_sequences
        self._counts = [0] * sum(map(len, generation.outputs))
        self._finished = [False] * len(self._counts)
        self._encoded_counts = b",".join([b"0"] * len(self._counts))
        self._events = 0
        self._from: StreamPosition | None = generation.resumed_from
        self._silent = generation.has_delivered_tokens

    def start(self) -> bytes:
        """Bytes before the first token."""
        events = _events_of(self._writer.start())
        position = self._from
        if position is None or position.stage == "b":
            skip = position.done if position else 0
            self._from = None
            return self._skip_delivered(b"b", events, skip)
        self._events = position.events - position.part
        self._writer.assign_ids(self._events)
        if position.stage == "" and not position.part and not self._silent:
            self._from = None
        return b""

    def write(self, news: Iterable[Any]) -> bytes:
        if not self._silent:
            return b"".join([self._write(delta) for delta in news])
        self._silent = False
        for delta in news:
            self._writer.write([delta])
            self._count(getattr(delta, "increment", delta), delta.finish_reason)
        if self._from is not None:
            self._writer.assign_ids(self._events)
            if not self._from.part and self._from.stage == "":
                self._from = None
        return b""

    def _write(self, delta: Any) -> bytes:
        increment: OutputDelta = getattr(delta, "increment", delta)
        index, previous_tokens = self._count(increment, delta.finish_reason)
        chunk = self._writer.write([delta])
        if not chunk:
            return b""
        if self._from is None and chunk.find(END) == len(chunk) - 2:
            self._events += 1
            return b"id: %b:%d:%b\n%b" % (self._stream, self._events, self._encoded_counts, chunk)
        return self._write_many(_events_of(chunk), index, previous_tokens)

    def _write_many(self, events: list[bytes], index: int, previous_tokens: int) -> bytes:
        """Several events for the same tokens; the ids of all but the last carry their number."""
        skip = self._from.part if self._from is not None else 0
        self._from = None
        out, last = [], len(events)
        for number, event in enumerate(events, start=1):
            self._events += 1
            if number <= skip:
                continue
            part = b"" if number == last else b":%d.%d.%d" % (index, previous_tokens, number)
            out.append(
                b"id: %b:%d:%b%b\n%b"
                % (self._stream, self._events, self._encoded_counts, part, event)
            )
        return b"".join(out)

    def _count(self, increment: OutputDelta, finish_reason: str | None) -> tuple[int, int]:
        """Record an output's tokens. Return its index and its previous number of tokens."""
        index = increment.number * self._choices + increment.index
        previous_tokens = self._counts[index]
        output = self._generation.outputs[increment.number][increment.index]
        self._counts[index] = output.num_tokens
        self._finished[index] = finish_reason is not None
        if len(self._counts) == 1:  # the usual case
            self._encoded_counts = (b"%d" if finish_reason is None else b"%d.") % output.num_tokens
        else:
            states = zip(self._counts, self._finished, strict=True)
            self._encoded_counts = b",".join(
                [b"%d." % n if is_finished else b"%d" % n for n, is_finished in states]
            )
        return index, previous_tokens

    def finish(self) -> bytes:
        """Bytes after the last token."""
        position = self._from
        skip = position.done if position is not None and position.stage == "e" else 0
        if skip:
            self._events -= skip
            self._writer.assign_ids(self._events)
        return self._skip_delivered(b"e", _events_of(self._writer.finish()), skip)

    def _skip_delivered(self, phase: bytes, events: list[bytes], skip: int) -> bytes:
        out = []
        for number, event in enumerate(events, start=1):
            self._events += 1
            if number > skip:
                fields = (self._stream, self._events, phase, number, event)
                out.append(b"id: %b:%d:%b%d\n%b" % fields)
        return b"".join(out)

    def error(self, error: QuireError) -> bytes:
        """The last event of a failed stream. It has no id: the previous event's id still counts."""
        return self._writer.error(error)


def _events_of(chunk: bytes) -> list[bytes]:
    return [event + END for event in chunk.split(END)[:-1]]
