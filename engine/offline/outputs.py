"""Outputs of `LLM`: `RequestOutput` and those of pooling models."""

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
    """A pooling model's output. `data` is float32 [size], or [num_tokens, size] for token tasks."""

    data: torch.Tensor

    @property
    def embedding(self) -> Any:
        """`data` as a list, or a list of lists."""
        return self.data.tolist()


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the vector."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probabilities of labels, in the order of `labels`."""

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
    """The score of how well two texts match."""

    score: float


Output = TypeVar("Output")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Output]):
    """The result of a pooling request. If it failed, `outputs` is None and `error` is set."""

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
    """Record a request's end, and return its values, float32 [num_values]; None if it failed."""
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
    """A generated output."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | FlatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds since the epoch; None until they happen.

    Attributes:
        arrival_time: when it was added.
        scheduled_ts: the start of its first step.
        first_token_ts, last_token_ts: times of the first and the latest token of its first output.
        num_generation_tokens: the number of tokens of all outputs.
    """

    arrival_time: float
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    num_generation_tokens: int = 0

    @property
    def queued_ts(self) -> float:
        """`arrival_time`, as a request is queued when it is added."""
        return self.arrival_time

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token; 0.0 before that."""
        first = self.first_token_ts
        return 0.0 if first is None else first - self.arrival_time

    @property
    def time_in_queue(self) -> float | None:
        """Seconds in the queue; None while the request waits."""
        return None if self.scheduled_ts is None else self.scheduled_ts - self.arrival_time

    @property
    def first_scheduled_time(self) -> float | None:
        """Alias of `scheduled_ts`."""
        return self.scheduled_ts

    @property
    def first_token_time(self) -> float | None:
        """Alias of `first_token_ts`."""
        return self.first_token_ts

    @property
    def last_token_time(self) -> float | None:
        """Alias of `last_token_ts`."""
        return self.last_token_ts

    @property
    def finished_time(self) -> float | None:
        """Alias of `last_token_ts`. It is the request's end once that has finished."""
        return self.last_token_ts


@dataclass(slots=True)
class RequestOutput:
    """The result of a request.

    Attributes:
        error: the error with which it failed, or None. Outputs that hadn't finished have the
            `finish_reason` "error" and their tokens so far.
        lora_request: the requested adapter.
        encoder_prompt, encoder_prompt_token_ids: the prompt of a text encoder.
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
