"""Layers with several hidden states a token (AltUp, arXiv 2301.13310), as Gemma 3n has them: a
layer predicts all of them, computes one anew, and corrects the others by what became of it.

To the others it then adds what an embedding of its own says of the token.
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
from engine.models.layers.linear import AltUpModelWeights, AltUpWeights
from engine.models.layers.norm import Norm, Transform, make_norm
from kernels import KernelSet, LinearLayer

#: Below this, the square of a hidden state's magnitude counts as this.
_MIN_SQUARE = 1e-5


class SparseGate:
    """relu(x - cutoff) in place of the first half of each row: of values that are spread normally,
    the share `sparsity` becomes 0.
    """

    __slots__ = ("_deviations",)

    def __init__(self, sparsity: float) -> None:
        self._deviations = NormalDist().inv_cdf(sparsity)

    def __call__(self, x: Tensor) -> Tensor:
        """x itself."""
        if not len(x):
            return x  # of nothing there is no deviation, as torch would warn
        gate = x[:, : x.shape[1] // 2]
        deviation = gate.std(dim=-1, keepdim=True, unbiased=False)
        cutoff = gate.mean(dim=-1, keepdim=True) + deviation * self._deviations
        gate.sub_(cutoff).relu_()
        return x


@dataclass(slots=True, kw_only=True)
class AltUp:
    """How a layer predicts and corrects hidden states [T, n, hidden], of which the first is active.

    Attributes:
        router: of the normed active state, to n numbers.
        prediction, correction: of these, to n * n and to n coefficients.
        output_scale: [hidden], of the corrected active state before it meets the layer's embedding;
            None: 1.
    """

    router_norm: Norm
    router: LinearLayer
    prediction: LinearLayer
    correction: LinearLayer
    output_scale: Tensor | None

    def _modalities(self, x: Tensor) -> Tensor:
        """[T, n] of x [T, hidden]."""
        routed = self.router(self.router_norm(x).mul_(1 / x.shape[1]))
        # In float64: torch's float32 tanh rounds the last few elements of a tensor differently.
        return routed.double().tanh_().to(routed.dtype)

    def predict(self, hidden: Tensor) -> Tensor:
        """All states, [T, n, hidden]."""
        count = hidden.shape[1]
        modalities = self._modalities(hidden[:, 0].contiguous())
        coefficients = self.prediction(modalities).unflatten(-1, (count, count))
        predicted = hidden.clone()
        # State by state: a product of matrices would add up in another order for other T.
        for state in range(count):
            predicted.addcmul_(coefficients[:, :, state, None], hidden[:, state, None])
        return predicted

    def correct(self, predicted: Tensor, active: Tensor) -> Tensor:
        """`predicted` itself, after the active state became [T, hidden]."""
        coefficients = self.correction(self._modalities(active)).add_(1)
        innovation = active - predicted[:, 0]
        return predicted.addcmul_(coefficients[:, :, None], innovation[:, None])


@dataclass(slots=True, kw_only=True)
class AltUpLayer:
    """One layer; x is unused, and the residual is [T, n, hidden].

    Attributes:
        index: the layer's number.
        laurel: low ranks of the normed state, normed (a learned augmented residual).
        gate: of the corrected active state, [T, size].
        gated_activation: of the gate and the layer's input side by side, [T, 2 size] -> [T, size].
            Its `projection` is added to the other states.
    """

    index: int
    altup: AltUp
    input_norm: Norm
    laurel: Transform
    attention: SelfAttention
    mlp_norm: Norm
    mlp: Transform
    gate: LinearLayer
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
        """x, and the residual."""
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
        if self.altup.output_scale is not None:
            first = first * self.altup.output_scale
        gated = self.gated_activation(torch.cat((self.gate(first), layer_input), dim=-1))
        corrected[:, 1:] += self.projection(gated)[:, None]
        return x, corrected


@dataclass(slots=True, kw_only=True)
class AltUpEnds:
    """What comes before the first layer and after the last one.

    Attributes:
        weights: of the model.
        norm: of a layer's share of the projected embedding.
    """

    spec: AltUpSpec
    weights: AltUpModelWeights
    norm: Norm

    def layer_inputs(self, token_ids: Tensor, hidden: Tensor, unnamed: Tensor | None) -> Tensor:
        """[T, num_layers, size]: for each layer what its own embedding and a projection of the
        token's embedding say.

        Args:
            token_ids: int64 [T].
            hidden: [T, hidden], the embeddings.
            unnamed: tokens without an id, int64 [n]; None: all have one.
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
        """[T, n, hidden]: the embedding [T, hidden], and products of it of its magnitude."""
        other_states = [_with_magnitude(layer(hidden), hidden) for layer in self.weights.expand]
        return torch.stack((hidden, *other_states), dim=1)

    def collapse(self, hidden: Tensor) -> Tensor:
        """[T, hidden], the mean of the first state and of products of the others."""
        first = hidden[:, 0].contiguous()
        states = [first]
        for number, layer in enumerate(self.weights.collapse, start=1):
            states.append(_with_magnitude(layer(hidden[:, number].contiguous()), first))
        return torch.stack(states).mean(dim=0)


def _with_magnitude(x: Tensor, reference: Tensor) -> Tensor:
    """x [T, hidden], in place as long as `reference`."""
    target = reference.square().mean(dim=-1, keepdim=True).sqrt()
    return x.mul_(target / x.square().mean(dim=-1, keepdim=True).clamp(min=_MIN_SQUARE).sqrt())


def make_altup(ops: KernelSet, weights: AltUpWeights, hidden: int, eps: float) -> AltUp:
    """A layer's."""
    return AltUp(
        router_norm=make_norm(ops, weights.router_norm, hidden, eps),
        router=weights.router,
        prediction=weights.prediction,
        correction=weights.correction,
        output_scale=weights.output_scale,
    )


def make_altup_ends(
    ops: KernelSet, spec: AltUpSpec, weights: AltUpModelWeights, eps: float
) -> AltUpEnds:
    """A model's."""
    norm = make_norm(ops, weights.projection_norm, spec.per_layer_size, eps)
    return AltUpEnds(spec=spec, weights=weights, norm=norm)
