"""The wirings of a layer: attention then MLP, both beside each other, or MLP and experts.

A layer takes x, which is its own norm of the residual, and gives the next layer's: so that adding
to the residual and the norm that follows are one kernel. In the last layer `rows` names the tokens
that are wanted further on; where tokens no longer meet, the others are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.models.attention import Attention
from engine.models.context import AttentionContext
from engine.models.latent_attention import LatentAttention
from engine.models.norms import Norm, Transform
from engine.models.states import StateMixer

#: What lets tokens meet. Attention takes a `LayerCache`, what carries a state `LayerStates`.
Meeting = Attention | LatentAttention | StateMixer


@dataclass(slots=True)
class SequentialLayer:
    """residual += attention(norm(residual)); residual += mlp(norm(residual))."""

    attention: Meeting
    mlp_norm: Norm
    mlp: Transform
    next_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionContext,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The next layer's x, and the residual."""
        x = self.attention(x, context, cache)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        x = self.mlp(self.mlp_norm.add(x, residual))
        return self.next_norm.add(x, residual), residual


@dataclass(slots=True)
class ParallelLayer:
    """residual += attention(norm(residual)) + mlp(norm'(residual)); norm' may be the same norm."""

    attention: Meeting
    mlp_norm: Norm | None
    mlp: Transform
    next_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionContext,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The next layer's x, and the residual."""
        attended = self.attention(x, context, cache)
        if rows is not None:
            attended, x, residual = attended[rows], x[rows], residual[rows]
        x = self.mlp(x if self.mlp_norm is None else self.mlp_norm(residual))
        return self.next_norm.add(x.add_(attended), residual), residual


@dataclass(slots=True)
class ResidualExpertsLayer:
    """Experts beside attention and the MLP after it (Snowflake's Arctic).

    before = residual; residual += attention(norm(residual));
    residual += mlp(norm'(residual)) + experts(norm"(before)).
    """

    attention: Meeting
    mlp_norm: Norm
    mlp: Transform
    experts_norm: Norm
    experts: Transform
    next_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionContext,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The next layer's x, and the residual."""
        x = self.attention(x, context, cache)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        chosen = self.experts(self.experts_norm(residual))
        x = self.mlp(self.mlp_norm.add(x, residual))
        return self.next_norm.add(x.add_(chosen), residual), residual


Layer = SequentialLayer | ParallelLayer | ResidualExpertsLayer
