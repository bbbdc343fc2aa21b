"""What writes one endpoint's stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, TypeVar

from engine.contract.errors import QuireError
from inference.errors import encode_error
from inference.web.streaming import EVENT_STREAM

#: A comment, and no blank line: behind an event with an id, OpenAI's and Anthropic's clients take
#: a blank line for an event without data, and fail on it.
HEARTBEAT = b": keep-alive\n"
DONE = b"data: [DONE]\n\n"

N = TypeVar("N")


class StreamWriter(ABC, Generic[N]):
    """Writes one endpoint's events.

    Attributes:
        heartbeat: what is written after a while without a token.
        content_type: of the response.
    """

    heartbeat: bytes = HEARTBEAT
    content_type: str = EVENT_STREAM

    def begin(self) -> bytes:
        """What comes before the first token; b"" for nothing."""
        return b""

    @abstractmethod
    def write(self, news: Iterable[N]) -> bytes:
        """Events for what is new; b"" for none."""

    @abstractmethod
    def end(self) -> bytes:
        """What comes after the last token."""

    def renumber(self, events: int) -> None:
        """The client has so many events: for those that carry numbers of their own."""

    def error(self, error: QuireError) -> bytes:
        """The stream's last event when the generation failed in the middle."""
        return b"event: error\ndata: " + encode_error(error) + b"\n\n"
