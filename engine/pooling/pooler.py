"""`Pooler`: from pooled hidden states to what a client gets."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.contract.messages import PoolingInfo
from engine.contract.pooling_params import PoolingParams
from engine.models.interface import ModelSpec, PoolingFacts
from engine.models.layers.norm import Transform
from engine.models.vision.dual_encoder import DUAL_ENCODERS
from engine.pooling.heads import ClassifierHeadFactory
from engine.pooling.pooling_config import PoolingModelConfig


@dataclass(slots=True)
class Pooler:
    """Turns pooled hidden states into results.

    Attributes:
        settings: the pooling model's description.
        hidden_size: the size of its hidden states.
        head: a classifier's head, [n, hidden] -> [n, labels].
        maker: makes heads for adapters that contain one; None if they can't.
        dense: layers between pooling and normalization of an embedding.
        projection: applied to each token's hidden state, in a model for late interaction.
        embedding_size: the size of an embedding before it is truncated.
    """

    settings: PoolingModelConfig
    hidden_size: int
    head: Transform | None = None
    dense: list[Transform] = field(default_factory=list)
    embedding_size: int = 0
    maker: ClassifierHeadFactory | None = None
    projection: Transform | None = None

    def facts(self, spec: ModelSpec) -> PoolingFacts:
        """Return the facts about a model with this spec for the engine core."""
        settings = self.settings
        info = PoolingInfo(
            embedding_size=self.embedding_size,
            matryoshka=None if settings.matryoshka is None else list(settings.matryoshka),
            labels=list(settings.labels),
            prompt=settings.files.prompt,
            similarity=settings.files.similarity,
            token_types=getattr(spec, "type_vocab_size", 0) > 1,
            image_or_text=settings.architecture in DUAL_ENCODERS,
        )
        return PoolingFacts(tuple(settings.tasks), info, settings.encoder, settings.caches_prefixes)

    def __call__(
        self, hidden: Tensor, params: PoolingParams, head: Transform | None = None
    ) -> Tensor:
        """Return float32 [n, size] for pooled hidden states [n, hidden_size].

        n is 1, or the number of tokens for tasks with a result per token. `head` is an adapter's
        head that replaces the model's own.
        """
        if self.head is None:
            return self._embedded(hidden, params)
        return self._classified((head or self.head)(hidden), params)

    def _embedded(self, hidden: Tensor, params: PoolingParams) -> Tensor:
        vectors = hidden if self.projection is None else self.projection(hidden)
        # Vectors of single tokens would not be in the same space as a prompt's vector.
        if not params.by_token:
            for layer in self.dense:
                vectors = layer(vectors)
        size = params.dimensions or self.settings.dimensions
        if size is not None:
            vectors = vectors[:, :size]
        if self._active(params):
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return vectors

    def _classified(self, logits: Tensor, params: PoolingParams) -> Tensor:
        if not self._active(params):
            return logits
        kind = self.settings.activation or ("sigmoid" if logits.shape[-1] == 1 else "softmax")
        return logits.sigmoid() if kind == "sigmoid" else logits.softmax(dim=-1)

    def _active(self, params: PoolingParams) -> bool:
        """Whether the activation is applied: as requested, else as the model does."""
        if params.use_activation is not None:
            return params.use_activation
        return bool(self.settings.activation)
