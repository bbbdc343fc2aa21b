"""What comes out: `RequestOutput` for `LLM`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.contract.errors import QuireError
from engine.contract.logprobs import FlatLogprobs, Logprob
from engine.contract.protocol import FlightRecord

__all__ = ["CompletionOutput", "FlatLogprobs", "Logprob", "RequestMetrics", "RequestOutput"]


@dataclass(slots=True)
class CompletionOutput:
    """One generated output."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | FlatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When what happened to a request: seconds since the epoch, None until it has.

    Attributes:
        arrival_time: it was added. scheduled_ts: its first step began. first_token_ts,
        last_token_ts: of its first output. num_generation_tokens: of all outputs.
    """

    arrival_time: float
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    num_generation_tokens: int = 0

    @property
    def queued_ts(self) -> float:
        """The same as `arrival_time`: a request is queued when it's added."""
        return self.arrival_time

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token; 0.0 before it."""
        first = self.first_token_ts
        return 0.0 if first is None else first - self.arrival_time

    @property
    def time_in_queue(self) -> float | None:
        """Seconds that it waited."""
        return None if self.scheduled_ts is None else self.scheduled_ts - self.arrival_time

    @property
    def first_scheduled_time(self) -> float | None:
        """The same as `scheduled_ts`."""
        return self.scheduled_ts

    @property
    def first_token_time(self) -> float | None:
        """The same as `first_token_ts`."""
        return self.first_token_ts

    @property
    def last_token_time(self) -> float | None:
        """The same as `last_token_ts`."""
        return self.last_token_ts

    @property
    def finished_time(self) -> float | None:
        """The same as `last_token_ts`, once the request has ended."""
        return self.last_token_ts


@dataclass(slots=True)
class RequestOutput:
    """A request's result, in the order of the prompts that were given.

    `error`: why it failed; None: it didn't. Outputs that hadn't ended by then have the
    `finish_reason` "error" and what they had so far.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | FlatLogprobs | None = None
    num_cached_tokens: int = 0
    finished: bool = True
    flights: list[FlightRecord] = field(default_factory=list)
    metrics: RequestMetrics | None = None
    error: QuireError | None = None
