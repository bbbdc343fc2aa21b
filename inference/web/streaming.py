"""A response of server-sent events that is always cleaned up, even if nobody reads it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from django.http import StreamingHttpResponse

EVENT_STREAM = "text/event-stream; charset=utf-8"


class LastChunk(bytes):
    """A stream's last chunk: the end of the response can leave in the same write."""


class EventStreamResponse(StreamingHttpResponse):
    """Server-sent events from an asynchronous generator of whole chunks.

    An asynchronous generator that was never started runs no `finally`. So `release` is called when
    the response is closed, whichever handler serves it and however far it came, and when it's
    forgotten: Django's own handler drops it unclosed when the client leaves while middleware has
    it. `release` must be idempotent, must not block, and is called in any thread.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        release: Callable[[], None],
        content_type: str = EVENT_STREAM,
    ) -> None:
        self._forgotten = release
        super().__init__(events, content_type=content_type)
        self.events = events
        self._resource_closers.append(release)
        self["Cache-Control"] = "no-cache"
        # nginx would collect the stream before it passes it on.
        self["X-Accel-Buffering"] = "no"

    def __del__(self) -> None:
        self._forgotten()
