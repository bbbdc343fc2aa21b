"""Layers with several hidden states per token (AltUp, arXiv 2301.13310), as in Gemma 3n.

A layer predicts all states, computes the active one, and corrects the others by the difference from
its prediction. It then adds a projection of the token's embedding for this layer to the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from engine.models.decoder_spec import AltUpSpec
from engine.models.forward_context import AttentionMetadata
from engine.models.layers.attention import SelfAttention
from engine.models.layers.norm import Norm, Transform
from engine.models.layers.weights import AltUpModelWeights, AltUpWeights

#: Minimum of a hidden state's mean square.
_MIN_SQUARE = 1e-5


class SparseGate:
    """relu(x - cutoff) in the first half of each row, in place. For normally distributed values,
    the share `sparsity` becomes 0.
    """

    __slots__ = ("_deviations",)

    def __init__(self, sparsity: float) -> None:
        self._deviations = NormalDist().inv_cdf(sparsity)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x itself."""
        if not len(x):
            return x  # torch warns about the deviation of nothing
        gate = x[:, : x.shape[1] // 2]
        deviation = gate.std(dim=-1, keepdim=True, unbiased=False)
        cutoff = gate.mean(dim=-1, keepdim=True) + deviation * self._deviations
        gate.sub_(cutoff).relu_()
        return x


@dataclass(slots=True, kw_only=True)
class AltUp:
    """A layer's prediction and correction of hidden states [T, n, hidden]; the first is active.

    Attributes:
        weights: the router from the active state after its norm to n numbers; prediction and
            correction, from these to n * n and to n coefficients; output_scale, the factor of the
            corrected active state before it gates the layer's embedding, None for 1.
    """

    router_norm: Norm
    weights: AltUpWeights

    def _modalities(self, x: Tensor) -> Tensor:
        """Return [T, n] for x [T, hidden]."""
        routed = self.weights.router(self.router_norm(x).mul_(1 / x.shape[1]))
        # In float64: torch's float32 tanh rounds the last few elements of a tensor differently.
        return routed.double().tanh_().to(routed.dtype)

    def predict(self, hidden: Tensor) -> Tensor:
        """Return the prediction of all states, [T, n, hidden]."""
        count = hidden.shape[1]
        modalities = self._modalities(hidden[:, 0].contiguous())
        coefficients = self.weights.prediction(modalities).unflatten(-1, (count, count))
        predicted = hidden.clone()
        # State by state: a matrix product may add in another order for other T.
        for state in range(count):
            predicted.addcmul_(coefficients[:, :, state, None], hidden[:, state, None])
        return predicted

    def correct(self, predicted: Tensor, active: Tensor) -> Tensor:
        """Correct `predicted` in place by the computed active state [T, hidden], and return it."""
        coefficients = self.weights.correction(self._modalities(active)).add_(1)
        innovation = active - predicted[:, 0]
        return predicted.addcmul_(coefficients[:, :, None], innovation[:, None])


@dataclass(slots=True, kw_only=True)
class AltUpLayer:
    """One layer; x is unused, and the residual is [T, n, hidden].

    Attributes:
        index: the layer's index.
        laurel: low-rank projections of the normed state, then a norm (learned augmented residual).
        gated_activation: of the gate, which is computed from the corrected active state, and the
            layer's input side by side, [T, 2 size] -> [T, size]. `projection` of the result is
            added to the other states.
    """

    index: int
    altup: AltUp
    input_norm: Norm
    laurel: Transform
    attention: SelfAttention
    mlp_norm: Norm
    mlp: Transform
    gated_activation: Transform
    projection: Transform

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionMetadata,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if context.layer_inputs is None:
            raise RuntimeError("the step doesn't say what its layers' inputs are")
        predicted = self.altup.predict(residual)
        active = predicted[:, 0].contiguous()
        normed = self.input_norm(active)
        laurel = normed + self.laurel(normed)
        active = self.attention(normed, context, cache).add_(active)
        layer_input = context.layer_inputs[:, self.index]
        if rows is not None:
            active, laurel = active[rows], laurel[rows]
            predicted, layer_input = predicted[rows], layer_input[rows]
        active = active.add_(laurel).mul_(math.sqrt(0.5))
        active = self.mlp(self.mlp_norm(active)).add_(active)
        corrected = self.altup.correct(predicted, active)
        first = corrected[:, 0].contiguous()
        weights = self.altup.weights
        if weights.output_scale is not None:
            first = first * weights.output_scale
        gated = self.gated_activation(torch.cat((weights.gate(first), layer_input), dim=-1))
        corrected[:, 1:] += self.projection(gated)[:, None]
        return x, corrected


@dataclass(slots=True, kw_only=True)
class AltUpEnds:
    """The computations before the first layer and after the last.

    Attributes:
        weights: the model's weights.
        norm: the norm of a layer's part of the projected embedding.
    """

    spec: AltUpSpec
    weights: AltUpModelWeights
    norm: Norm

    def layer_inputs(self, token_ids: Tensor, hidden: Tensor, unnamed: Tensor | None) -> Tensor:
        """Return each layer's inputs [T, num_layers, size]: the sum of its own scaled embedding of
        a token and of a projection of the token's embedding, times sqrt(1/2).

        Args:
            token_ids: int64 [T].
            hidden: [T, hidden], the embeddings.
            unnamed: tokens without an id, int64 [n], which have only the projection; None if all
                have one.
        """
        spec, size = self.spec, self.spec.per_layer_size
        projected = self.weights.projection(hidden).mul_(hidden.shape[1] ** -0.5)
        projected = self.norm(projected.view(-1, size)).view(len(hidden), -1, size)
        table_ids = torch.where(token_ids < spec.per_layer_vocab_size, token_ids, 0)
        rows = self.weights.table.rows(table_ids).to(projected).view_as(projected)
        inputs = rows.mul_(size**0.5).add_(projected).mul_(math.sqrt(0.5))
        if unnamed is not None:
            inputs[unnamed] = projected[unnamed]
        return inputs

    def expand(self, hidden: Tensor) -> Tensor:
        """Return states [T, n, hidden]: hidden [T, hidden] and its projections, equally large."""
        other_states = [_with_magnitude(layer(hidden), hidden) for layer in self.weights.expand]
        return torch.stack((hidden, *other_states), dim=1)

    def collapse(self, hidden: Tensor) -> Tensor:
        """Return [T, hidden], the mean of the first state and of projections of the others."""
        first = hidden[:, 0].contiguous()
        states = [first]
        for number, layer in enumerate(self.weights.collapse, start=1):
            states.append(_with_magnitude(layer(hidden[:, number].contiguous()), first))
        return torch.stack(states).mean(dim=0)


def _with_magnitude(x: Tensor, reference: Tensor) -> Tensor:
    """Scale x [T, hidden] to the magnitude of `reference` in place, and return it."""
    target = reference.square().mean(dim=-1, keepdim=True).sqrt()
    return x.mul_(target / x.square().mean(dim=-1, keepdim=True).clamp(min=_MIN_SQUARE).sqrt())
