"""What `LLM.embed` and its like return. Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch


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
    """A request's result, in the order of the prompts that were given."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
