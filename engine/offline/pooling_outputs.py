"""What `LLM.embed` and its like return. Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from engine.contract.errors import EngineFault, QuireError
from engine.contract.protocol import TokenDelta


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
        """Its length."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """`probs`: one a label, in the order of `labels`."""

    probs: list[float]
    labels: list[str]

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)

    @property
    def label(self) -> str:
        """The likeliest."""
        return self.labels[self.probs.index(max(self.probs))]


@dataclass(slots=True)
class ScoringOutput:
    """`score`: how well the two texts fit."""

    score: float


Output = TypeVar("Output")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Output]):
    """A request's result, in the order of the prompts that were given.

    `error`: why it failed, and `outputs` is None then.
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


def take_end(result: PoolingRequestOutput[Any], delta: TokenDelta) -> torch.Tensor | None:
    """Note how a request ended; its values, float32 [num_values], or None if it failed."""
    result.num_cached_tokens, result.finished = delta.num_cached_tokens, True
    if delta.error is not None:
        result.error = delta.error.to_error()
    elif delta.pooled is None:
        result.error = EngineFault("The engine gave no result.")
    else:
        return torch.frombuffer(bytearray(delta.pooled), dtype=torch.float32)
    return None
