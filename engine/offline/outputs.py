"""Outputs of `LLM`: `RequestOutput` and those of pooling models. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from engine.contract.errors import EngineFault, QuireError
from engine.contract.logprobs import FlatLogprobs, Logprob
from engine.contract.lora import LoRARequest
from engine.contract.messages import FlightRecord, TokenDelta


@dataclass(slots=True)
class PoolingOutput:
    """`data`: float32 [size], or [num_tokens, size] for the tasks by token."""

    data: torch.Tensor

    @property
    def embedding(self) -> Any:
        """The same as a list, or as a list of lists."""
        return self.data.tolist()


@dataclass(slots=True)
class EmbeddingOutput:
    """`embedding`: the vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the vector."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """`probs`: one per label, in the order of `labels`."""

    probs: list[float]
    labels: list[str]

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)

    @property
    def label(self) -> str:
        """The most probable label."""
        return self.labels[self.probs.index(max(self.probs))]


@dataclass(slots=True)
class ScoringOutput:
    """`score`: how well the two texts match."""

    score: float


Output = TypeVar("Output")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Output]):
    """A request's result; results are in the order of the prompts.

    `error`: why it failed; `outputs` is None then.
    """

    request_id: str
    outputs: Output | None
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: QuireError | None = None


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


def record_end(result: PoolingRequestOutput[Any], delta: TokenDelta) -> torch.Tensor | None:
    """Record the end of a request: its values, float32 [num_values], or None if it failed."""
    result.num_cached_tokens, result.finished = delta.num_cached_tokens, True
    if delta.error is not None:
        result.error = delta.error.to_error()
    elif delta.pooled is None:
        result.error = EngineFault("The engine gave no result.")
    else:
        return torch.frombuffer(bytearray(delta.pooled), dtype=torch.float32)
    return None


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
        """Whether the output has finished."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request's events: seconds since the epoch, None until they happen.

    Attributes:
        arrival_time: when it was added. scheduled_ts: start of its first step. first_token_ts,
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
        """Seconds that the request waited."""
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
    """A request's result; results are in the order of the prompts.

    `error`: why it failed; None: it didn't. Outputs that were unfinished then have the
    `finish_reason` "error" and their tokens so far. `lora_request`: the requested adapter.
    `encoder_prompt`, `encoder_prompt_token_ids`: of a model whose encoder reads a text.
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
    lora_request: LoRARequest | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None


__all__ = ["CompletionOutput", "FlatLogprobs", "Logprob", "RequestMetrics", "RequestOutput"]
