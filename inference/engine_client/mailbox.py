"""`TokenQueue`: tokens between the outbox reader and one consumer, merged while it is slow."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import islice

from engine.contract.errors import QuireError
from engine.contract.messages import FlightRecord, TokenDelta, TokenLogprobs
from inference.loop.fair_dispatch import wake_dispatch

#: Maximum number of chunks that a consumer gets in one iteration of the event loop.
MAX_CHUNKS_PER_GET = 64


@dataclass(slots=True)
class TokenChunk:
    """New tokens of one output: a `TokenDelta` without duplicates, or several merged.

    Attributes:
        number: index of the request in the submission. index: index of the output in the request.
        token_ids: new tokens. logprobs: one entry per token if requested.
        prompt_logprobs: once, on the request's first chunk.
        finish_reason, stop_reason: set on an output's last chunk.
        num_cached_tokens: prompt tokens that the engine had cached; on the first and last chunk.
        flight: the engine's record, on the last chunk.
        pooled: a pooling model's result, see `TokenDelta`.
    """

    number: int
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    flight: FlightRecord | None = None
    pooled: bytes | None = None

    def merge(self, later: TokenChunk) -> None:
        """Append a later chunk of the same output."""
        self.token_ids.extend(later.token_ids)
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, later.num_cached_tokens)
        self.flight = later.flight or self.flight
        self.pooled = later.pooled or self.pooled


def chunk_from_delta(delta: TokenDelta, number: int, skip: int) -> TokenChunk:
    """A delta without its first `skip` tokens, which the consumer already has."""
    logprobs = delta.logprobs
    return TokenChunk(
        number,
        delta.index,
        delta.token_ids[skip:] if skip else delta.token_ids,
        logprobs[skip:] if logprobs and skip else logprobs,
        delta.prompt_logprobs,
        delta.finish_reason,
        delta.stop_reason,
        delta.num_cached_tokens,
        delta.flight,
        delta.pooled,
    )


class TokenQueue:
    """Chunks for one consumer. The writer never waits; chunks merge while the consumer is slow.

    At most one chunk per output is queued, so memory is bounded by the request's maximum number of
    tokens, however slow the consumer is. Of the hundreds of consumers of a step only a few are
    woken per iteration of the loop, tenant by tenant, and tokens that arrive meanwhile are merged:
    the further the loop falls behind, the less it has to do. Not thread-safe: writer and consumer
    share a loop.
    """

    __slots__ = (
        "_chunks",
        "_deadline",
        "_error",
        "_is_queued",
        "_is_rest",
        "_tenant",
        "_timer",
        "_waiter",
    )

    def __init__(self, tenant: str = "") -> None:
        self._tenant, self._is_queued = tenant, False
        self._chunks: dict[tuple[int, int], TokenChunk] = {}
        self._is_rest = False
        self._error: QuireError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def push(self, chunk: TokenChunk) -> None:
        """Add a chunk and wake the consumer."""
        key = (chunk.number, chunk.index)
        waiting = self._chunks.get(key)
        if waiting is None:
            self._chunks[key] = chunk
        else:
            waiting.merge(chunk)
        self._wake()

    def fail(self, error: QuireError) -> None:
        """Raise `error` at the consumer once it has read the queued chunks."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not self._is_queued and not waiter.done():
            self._is_queued = True
            wake_dispatch.current().admit(self._tenant, waiter)

    async def get(self, wait_s: float | None = None) -> list[TokenChunk]:
        """Return queued chunks, at most one per output; [] after `wait_s` seconds without any.

        Of thousands of outputs it returns a few at a time, so that other consumers run in between.

        Raises: the error that the writer set with `fail`.
        """
        if not self._chunks and self._error is None:
            await self._wait(wait_s)
        elif self._is_rest:
            await asyncio.sleep(0)
        if self._chunks:
            first = list(islice(self._chunks, MAX_CHUNKS_PER_GET))
            chunks = [self._chunks.pop(key) for key in first]
            self._is_rest = bool(self._chunks)
            return chunks
        if self._error is not None:
            raise self._error
        return []

    async def _wait(self, wait_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waiter, self._is_queued = loop.create_future(), False
        if wait_s is not None:
            self._schedule_timeout(wait_s, loop)
        try:
            await self._waiter
        finally:
            self._waiter = self._deadline = None

    def _schedule_timeout(self, wait_s: float, loop: asyncio.AbstractEventLoop) -> None:
        """Schedule a wake-up, unless one is scheduled: a timer per token would cost too much."""
        self._deadline = loop.time() + wait_s
        if self._timer is not None and self._timer.when() > self._deadline:
            self.close()
        if self._timer is None:
            self._timer = loop.call_later(wait_s, self._on_timeout, loop)

    def _on_timeout(self, loop: asyncio.AbstractEventLoop) -> None:
        """The timer fired: end the wait, or reschedule if another wait began since it was set."""
        self._timer, deadline = None, self._deadline
        if deadline is None:
            return
        remaining_s = deadline - loop.time()
        if remaining_s <= 0:
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        else:
            self._timer = loop.call_later(remaining_s, self._on_timeout, loop)

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
