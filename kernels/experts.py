"""A mixture of experts on any set of kernels, one expert after the other.

What runs where a set has nothing faster, and what the faster ones are compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.activations import ACTIVATIONS, GatedKernels, gated_activation
from kernels.layers import ExpertLayers, LinearLayer, MixtureOfExperts


def check_experts(experts: ExpertLayers) -> None:
    """Raise ValueError for what doesn't fit together."""
    count = len(experts.gate_up)
    if not 1 <= experts.top_k <= count or len(experts.down) != count:
        raise ValueError(f"{experts.top_k} of {count} experts, {len(experts.down)} of them down")
    if (experts.shared_down is None) != (experts.shared_gate_up is None):
        raise ValueError("a shared expert has two layers")
    if experts.activation.name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation must be one of {known}; got {experts.activation.name!r}")


def bytes_read(experts: ExpertLayers) -> int:
    """Bytes that a pass over one token reads: of the experts only those that it is sent to."""
    chosen = sum(layer.nbytes for layer in (*experts.gate_up, *experts.down))
    always = (
        experts.router, experts.shared_gate_up, experts.shared_down, experts.shared_gate,
    )  # fmt: skip
    return chosen * experts.top_k // len(experts.gate_up) + sum(
        layer.nbytes for layer in always if layer is not None
    )


class ExpertsOneByOne(MixtureOfExperts):
    """Tokens are sorted by expert, so that each expert that is hit runs once on its own rows."""

    def __init__(self, ops: GatedKernels, experts: ExpertLayers) -> None:
        """Raises ValueError for what doesn't fit together."""
        check_experts(experts)
        self._experts, self._act = experts, gated_activation(ops, experts.activation)
        self.nbytes = bytes_read(experts)

    def __call__(self, x: Tensor) -> Tensor:
        """See `MixtureOfExperts.__call__`."""
        experts = self._experts
        weights, chosen = route(experts, x)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        tokens = order // experts.top_k
        rows, scales = x[tokens], weights.flatten()[order].unsqueeze(-1)
        out, start = self._shared(x), 0
        for expert, count in enumerate(torch.bincount(flat).tolist()):
            if count:
                part = slice(start, start + count)
                given = self._mlp(experts.gate_up[expert], experts.down[expert], rows[part])
                out.index_add_(0, tokens[part], (given * scales[part]).to(out.dtype))
                start += count
        return out

    def tensors(self) -> dict[str, Tensor]:
        """See `MixtureOfExperts.tensors`."""
        experts = self._experts
        layers = {
            "router": experts.router,
            "shared.gate_up": experts.shared_gate_up,
            "shared.down": experts.shared_down,
            "shared.gate": experts.shared_gate,
        }
        for part, each in (("gate_up", experts.gate_up), ("down", experts.down)):
            layers |= {f"{index}.{part}": layer for index, layer in enumerate(each)}
        return {
            f"{name}.{part}": tensor
            for name, layer in layers.items()
            if layer is not None
            for part, tensor in layer.tensors().items()
        }

    def _mlp(self, gate_up: LinearLayer, down: LinearLayer, x: Tensor) -> Tensor:
        return down(self._act(gate_up(x)))

    def _shared(self, x: Tensor) -> Tensor:
        """What the expert of all tokens says, or zeros."""
        experts = self._experts
        if experts.shared_gate_up is None or experts.shared_down is None:
            return torch.zeros_like(x)
        out = self._mlp(experts.shared_gate_up, experts.shared_down, x)
        gate = experts.shared_gate
        return out if gate is None else torch.sigmoid(gate(x)) * out


def route(experts: ExpertLayers, x: Tensor) -> tuple[Tensor, Tensor]:
    """Which experts x [T, H] goes to: weights float32 and ids int64, [T, top_k], best first."""
    scores, top_k = experts.router(x).float(), experts.top_k
    if experts.softmax_first:
        weights, chosen = torch.softmax(scores, dim=-1).topk(top_k, dim=-1)
        if experts.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen
    scores, chosen = scores.topk(top_k, dim=-1)
    return torch.softmax(scores, dim=-1), chosen
