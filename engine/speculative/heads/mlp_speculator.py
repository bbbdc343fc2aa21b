"""`MlpSpeculator`: IBM's accelerators.

Wertheimer et al. 2024, "Accelerating Production LLMs with Combined Token/Embedding Speculators".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu

from engine.speculative.heads.base import DraftHeads, HeadCheckpoint, apply_linear
from kernels import LinearLayer

_EPS = 1e-6
_PREFIX = "speculator."


@dataclass(frozen=True, slots=True)
class _Stage:
    """The weights that compute one draft."""

    embedding: LinearLayer
    projection: LinearLayer
    norm_weight: Tensor
    norm_bias: Tensor
    head: LinearLayer


class MlpSpeculator(DraftHeads):
    """One stage per draft, computed from the previous state and the newest token's embedding.

    z = gelu(norm(P s + a e)), logits = H z; z is the next stage's s. `a` is chosen so that over all
    stages the weight of the first state halves.
    """

    def __init__(self, source: HeadCheckpoint) -> None:
        if (kind := source.config.get("speculator_type", "mlp")) != "mlp":
            raise source.error(f"speculator_type {kind!r:.80} isn't run: only plain MLPs are")
        source.same("emb_dim", source.hidden_size)
        source.same("vocab_size", source.vocab_size)
        self.max_drafts = source.integer("n_predict", 1, 64)
        self._inner = source.integer("inner_dim", 0, default=0) or source.hidden_size
        self._scales_input = source.flag("scale_input", default=False)
        tied = source.flag("tie_weights", default=False)
        if tied and self.max_drafts == 1:
            raise source.error("tie_weights needs n_predict of 2 at least")
        self._feeds = source.feeds
        sizes = [source.hidden_size, *[self._inner] * (self.max_drafts - 1)]
        self._stages = (
            _tied(source, self.max_drafts, self._inner)
            if tied
            else [_stage(source, index, self._inner, size) for index, size in enumerate(sizes)]
        )
        decay = 0.5 ** (0.5 / self.max_drafts)
        self._token_weight = math.sqrt((1 - decay**2) * (self._inner / 2)) / decay
        self.nbytes = source.nbytes

    def start(self, hidden: Tensor) -> Tensor:
        return _normed(hidden) / math.sqrt(2) if self._scales_input else hidden

    def logits(self, depth: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        stage = self._stages[depth]
        mixed = apply_linear(stage.projection, state, self._feeds)
        mixed = mixed + self._token_weight * stage.embedding.rows(tokens)
        state = gelu(_normed(mixed) * stage.norm_weight + stage.norm_bias)
        return apply_linear(stage.head, state, self._feeds), state


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPS)


def _stage(source: HeadCheckpoint, index: int, inner: int, size: int) -> _Stage:
    """Read stage `index`, whose state has `size` elements."""
    return _Stage(
        embedding=source.linear(f"{_PREFIX}emb.{index}.weight", source.vocab_size, inner),
        projection=source.linear(f"{_PREFIX}proj.{index}.weight", inner, size),
        norm_weight=source.vector(f"{_PREFIX}ln.{index}.weight", inner),
        norm_bias=source.vector(f"{_PREFIX}ln.{index}.bias", inner),
        head=source.linear(f"{_PREFIX}head.{index}.weight", source.vocab_size, inner),
    )


def _tied(source: HeadCheckpoint, count: int, inner: int) -> list[_Stage]:
    """Return stages that share the first one's weights, except for the projection: the second and
    later stages share another one.
    """
    first = _stage(source, 0, inner, source.hidden_size)
    shared = source.linear(f"{_PREFIX}proj.1.weight", inner, inner)
    later = _Stage(first.embedding, shared, first.norm_weight, first.norm_bias, first.head)
    copies = [
        f"{_PREFIX}{part}.{index}.{kind}"
        for part in ("emb", "proj", "ln", "head")
        for index in range(1, count)
        for kind in ("weight", "bias")
    ]
    source.weights.mark_used(copies)  # some files repeat shared tensors for each stage
    return [first, *[later] * (count - 1)]
