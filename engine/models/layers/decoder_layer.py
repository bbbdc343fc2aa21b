"""The wirings of a layer: attention then MLP, both in parallel, or MLP and experts.

A layer takes x, its own norm of the residual, and returns the next layer's x, so that adding to the
residual and the next norm are one kernel. In the last layer `rows` lists the tokens whose results
are needed; the others are dropped as soon as no token attends to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.models.forward_context import AttentionMetadata
from engine.models.layers.altup import AltUpLayer
from engine.models.layers.attention import (
    CrossAttention,
    SelfAttention,
)
from engine.models.layers.mamba import StateMixer
from engine.models.layers.mla import MlaAttention
from engine.models.layers.norm import (
    Norm,
    Transform,
)
from kernels import LinearLayer


@dataclass(slots=True)
class AttentionAndState:
    """Sum of the outputs of attention and of a state for the same tokens.

    Its cache is a pair of keys and values, and of states.
    """

    attention: SelfAttention | MlaAttention
    mixer: StateMixer

    def __call__(self, x: Tensor, context: AttentionMetadata, cache: Any) -> Tensor:
        """Return [num_tokens, hidden] for x of that shape."""
        keys_and_values, states = cache
        return self.attention(x, context, keys_and_values).add_(self.mixer(x, context, states))


#: Parts of a layer in which a token's result depends on others. Attention has a `LayerCache`, a
#: state a `LayerStateCache`.
TokenMixer = SelfAttention | MlaAttention | StateMixer | AttentionAndState


@dataclass(slots=True)
class MixerLayer:
    """residual += attention(norm(residual)), without an MLP."""

    attention: TokenMixer
    next_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionMetadata,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the next layer's x and the residual."""
        x = self.attention(x, context, cache)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        return self.next_norm.add_and_norm(x, residual), residual


@dataclass(slots=True)
class MlpLayer:
    """residual += mlp(norm(residual)), without attention."""

    mlp: Transform
    next_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionMetadata,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if rows is not None:
            x, residual = x[rows], residual[rows]
        return self.next_norm.add_and_norm(self.mlp(x), residual), residual


@dataclass(slots=True)
class SequentialLayer:
    """residual += attention(norm(residual)); residual += mlp(norm(residual))."""

    attention: TokenMixer
    mlp_norm: Norm
    mlp: Transform
    next_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionMetadata,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        x = self.attention(x, context, cache)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        x = self.mlp(self.mlp_norm.add_and_norm(x, residual))
        return self.next_norm.add_and_norm(x, residual), residual


@dataclass(slots=True)
class NormedResidualLayer:
    """residual = norm(residual) * attention_factor; residual += attention(norm(residual)); then
    likewise with the MLP. In contrast to other layers, the norm's output becomes the residual.
    """

    attention: TokenMixer
    attention_factor: float
    mlp_norm: Norm
    mlp: Transform
    mlp_factor: float
    next_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionMetadata,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        residual = x * self.attention_factor
        x = self.attention(x, context, cache)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        x = self.mlp_norm.add_and_norm(x, residual)
        residual = x * self.mlp_factor
        return self.next_norm.add_and_norm(self.mlp(x), residual), residual


@dataclass(slots=True)
class CrossLayer:
    """residual += attention(norm(residual)); residual += cross(norm'(residual), encoder);
    residual += mlp(norm"(residual)). With `post` each norm's output becomes the residual.

    Its cache is a pair of the tokens' keys and values, and of the encoder's.
    """

    attention: SelfAttention
    cross_norm: Norm
    cross: CrossAttention
    mlp_norm: Norm
    mlp: Transform
    next_norm: Norm
    post: bool = False

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionMetadata,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        tokens, states = cache
        x = self.attention(x, context, tokens)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        x = self.cross_norm.add_and_norm(x, residual)
        residual = x if self.post else residual
        x = self.cross(x, context.other_groups[-1], states, rows)
        x = self.mlp_norm.add_and_norm(x, residual)
        residual = x if self.post else residual
        x = self.next_norm.add_and_norm(self.mlp(x), residual)
        return x, x if self.post else residual


@dataclass(slots=True)
class SharedBlock:
    """linear(mlp(norm(attention(norm(hidden state and embedding))))), without residuals inside."""

    attention_norm: Norm
    attention: SelfAttention
    mlp_norm: Norm
    mlp: Transform
    output: LinearLayer

    def __call__(self, residual: Tensor, context: AttentionMetadata, cache: Any) -> Tensor:
        """Return [num_tokens, hidden] for a residual of that shape."""
        if context.embeddings is None:
            raise RuntimeError("the step doesn't say what its embeddings are")
        both = torch.cat((residual, context.embeddings), dim=-1)
        attended = self.attention(self.attention_norm(both), context, cache)
        return self.output(self.mlp(self.mlp_norm(attended)))


@dataclass(slots=True)
class SharedBlockLayer:
    """residual += state(norm(residual + block(residual))).

    Its cache is a pair of keys and values, and of states.
    """

    block: SharedBlock
    mixer_norm: Norm
    mixer: StateMixer
    next_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionMetadata,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        keys_and_values, states = cache
        x = self.block(residual, context, keys_and_values).add_(residual)
        x = self.mixer(self.mixer_norm(x), context, states)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        return self.next_norm.add_and_norm(x, residual), residual


@dataclass(slots=True)
class ParallelLayer:
    """residual += attention(norm(residual)) + mlp(norm'(residual)); norm' may be the same norm."""

    attention: TokenMixer
    mlp_norm: Norm | None
    mlp: Transform
    next_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionMetadata,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        attended = self.attention(x, context, cache)
        if rows is not None:
            attended, x, residual = attended[rows], x[rows], residual[rows]
        x = self.mlp(x if self.mlp_norm is None else self.mlp_norm(residual))
        return self.next_norm.add_and_norm(x.add_(attended), residual), residual


@dataclass(slots=True)
class ResidualExpertsLayer:
    """Experts in parallel to attention and the following MLP (Snowflake's Arctic).

    before = residual; residual += attention(norm(residual));
    residual += mlp(norm'(residual)) + experts(norm"(before)).
    """

    attention: TokenMixer
    mlp_norm: Norm
    mlp: Transform
    experts_norm: Norm
    experts: Transform
    next_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionMetadata,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        x = self.attention(x, context, cache)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        chosen = self.experts(self.experts_norm(residual))
        x = self.mlp(self.mlp_norm.add_and_norm(x, residual))
        return self.next_norm.add_and_norm(x.add_(chosen), residual), residual


Layer = (
    SequentialLayer
    | NormedResidualLayer
    | CrossLayer
    | ParallelLayer
    | ResidualExpertsLayer
    | MixerLayer
    | MlpLayer
    | SharedBlockLayer
    | AltUpLayer
)
