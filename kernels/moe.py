"""A mixture of experts on any kernel set, expert by expert.

It is the fallback for sets without a faster implementation, and the reference for these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kernels.layers import (
    ACTIVATIONS,
    ExpertLayers,
    GatedKernels,
    MixtureOfExperts,
    gated_activation,
)
from kernels.lora import ExpertUse, LoraSegment, MoeLoraMapping

if TYPE_CHECKING:
    from kernels.layers import LinearLayer


#: From a layer's slot, x, and the ascending rows of the mixture that x consists of, to the result.
ExpertLinears = Callable[[str, Tensor, Tensor], Tensor]


class LoraKernels(Protocol):
    """A kernel set's `add_lora`."""

    def add_lora(self, y: Tensor, x: Tensor, uses: Sequence[LoraSegment]) -> None: ...


class AdaptedLinears:
    """`ExpertLinears` with the additions of rows' adapters, if `uses` has any."""

    def __init__(
        self, ops: LoraKernels, layers: Mapping[str, LinearLayer], uses: Sequence[ExpertUse]
    ) -> None:
        self._ops, self._layers, self._uses = ops, layers, uses

    def __call__(self, slot: str, x: Tensor, tokens: Tensor) -> Tensor:
        y = self._layers[slot](x)
        matching = [
            (loras[slot], torch.isin(tokens, rows).nonzero().flatten())
            for loras, rows in self._uses
            if slot in loras
        ]
        if non_empty := [use for use in matching if len(use[1])]:
            self._ops.add_lora(y, x, non_empty)
        return y


class SlottedLinears:
    """The same for adapters in slots."""

    def __init__(
        self, layers: Mapping[str, LinearLayer], rows: MoeLoraMapping, owners: Tensor
    ) -> None:
        self._layers, self._rows, self._owners = layers, rows, owners

    def __call__(self, slot: str, x: Tensor, tokens: Tensor) -> Tensor:
        y = self._layers[slot](x)
        kind, _, expert = slot.partition(".")
        if expert:
            target, owners = self._rows.target(kind), self._owners[tokens]
            self._rows.slots.add_expert(target, int(expert), y, x, owners)
        else:
            self._rows.add(slot, y, x)
        return y


#: Minimum sum of weights, against division by zero; a softmax's sum is far above.
MIN_WEIGHT_SUM = 1e-20


def check_experts(experts: ExpertLayers) -> None:
    """Raise ValueError for inconsistent arguments."""
    count = len(experts.gate_up)
    if not 1 <= experts.top_k <= count or len(experts.down) != count:
        raise ValueError(f"{experts.top_k} of {count} experts, {len(experts.down)} of them down")
    _check_groups(experts)
    if (experts.shared_down is None) != (experts.shared_gate_up is None):
        raise ValueError("a shared expert has two layers")
    bias = experts.choice_bias
    if bias is not None and (bias.shape != (count,) or bias.dtype != torch.float32):
        raise ValueError(f"choice_bias must be float32 [{count}]")
    if experts.activation.name not in ACTIVATIONS:
        supported = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation must be one of {supported}; got {experts.activation.name!r}")


def _check_groups(experts: ExpertLayers) -> None:
    """Raise ValueError for invalid groups, or groups with too few experts to choose from."""
    count, groups = len(experts.gate_up), experts.groups
    if groups < 1 or count % groups or not 1 <= experts.top_groups <= groups:
        raise ValueError(f"{experts.top_groups} of {groups} groups of {count} experts")
    size = count // groups
    if experts.top_k > experts.top_groups * size:
        raise ValueError(f"{experts.top_k} experts of {experts.top_groups} groups of {size}")
    if not 1 <= experts.group_best <= min(2, size):
        raise ValueError(f"{experts.group_best} of a group's {size} scores")


def bytes_read(experts: ExpertLayers) -> int:
    """Return the bytes that a pass over a token reads; of the experts, only the chosen count."""
    chosen = sum(layer.nbytes for layer in (*experts.gate_up, *experts.down))
    always = (
        experts.router, experts.shared_gate_up, experts.shared_down, experts.shared_gate,
    )  # fmt: skip
    return chosen * experts.top_k // len(experts.gate_up) + sum(
        layer.nbytes for layer in always if layer is not None
    )


class ExpertKernels(GatedKernels, LoraKernels, Protocol):
    """The operations of a kernel set that the mixture uses."""


class SequentialMoe(MixtureOfExperts):
    """Sorts tokens by expert, so that each chosen expert runs once, on its rows."""

    needs_host_sync = True

    def __init__(self, ops: ExpertKernels, experts: ExpertLayers) -> None:
        """Raises ValueError for inconsistent arguments."""
        check_experts(experts)
        self._ops, self.layers, self._linears = ops, experts, experts.linears()
        self._experts, self._act = experts, gated_activation(ops, experts.activation)
        self.nbytes = bytes_read(experts)

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward_with_adapters(x, ())

    def forward_with_adapters(self, x: Tensor, uses: Sequence[ExpertUse]) -> Tensor:
        return self._run(x, AdaptedLinears(self._ops, self._linears, uses))

    def forward_with_slots(self, x: Tensor, rows: MoeLoraMapping) -> Tensor:
        return self._run(x, SlottedLinears(self._linears, rows, rows.slot_by_row(len(x))))

    def _run(self, x: Tensor, layers: ExpertLinears) -> Tensor:
        experts, every = self._experts, torch.arange(len(x), device=x.device)
        weights, chosen = route(experts, layers("router", x, every))
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        tokens = order // experts.top_k
        rows, scales = x[tokens], weights.flatten()[order].unsqueeze(-1)
        out, start = self._shared(x, every, layers), 0
        for expert, count in enumerate(torch.bincount(flat).tolist()):
            if count:
                part = slice(start, start + count)
                up = self._act(layers(f"up.{expert}", rows[part], tokens[part]))
                expert_output = layers(f"down.{expert}", up, tokens[part])
                out.index_add_(0, tokens[part], (expert_output * scales[part]).to(out.dtype))
                start += count
        return out

    def tensors(self) -> dict[str, Tensor]:
        experts = self._experts
        layers = {
            "router": experts.router,
            "shared.gate_up": experts.shared_gate_up,
            "shared.down": experts.shared_down,
            "shared.gate": experts.shared_gate,
        }
        for part, expert_layers in (("gate_up", experts.gate_up), ("down", experts.down)):
            layers |= {f"{index}.{part}": layer for index, layer in enumerate(expert_layers)}
        tensors = {
            f"{name}.{part}": tensor
            for name, layer in layers.items()
            if layer is not None
            for part, tensor in layer.tensors().items()
        }
        bias = experts.choice_bias
        return tensors if bias is None else {**tensors, "choice_bias": bias}

    def _shared(self, x: Tensor, every: Tensor, layers: ExpertLinears) -> Tensor:
        """Return the shared expert's output, or zeros."""
        experts = self._experts
        if experts.shared_gate_up is None or experts.shared_down is None:
            return torch.zeros_like(x)
        out = layers("shared_down", self._act(layers("shared_up", x, every)), every)
        if experts.shared_gate is None:
            return out
        return torch.sigmoid(layers("shared_gate", x, every)) * out


def route(experts: ExpertLayers, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Route rows by their scores [T, E]: return weights float32 and ids int64 [T, top_k]."""
    scores, bias = scores.float(), experts.choice_bias
    if experts.sigmoid:
        scores = torch.sigmoid(scores)
    elif experts.softmax_first:
        scores = torch.softmax(scores, dim=-1)
    by = _mask_other_groups(experts, scores if bias is None else scores + bias)
    chosen = by.topk(experts.top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if not experts.sigmoid and not experts.softmax_first:
        weights = torch.softmax(weights, dim=-1)
    elif experts.renormalize:
        # All sigmoids may be 0.
        weights = weights / (weights.sum(dim=-1, keepdim=True) + MIN_WEIGHT_SUM)
    return weights * experts.scale, chosen


def _mask_other_groups(experts: ExpertLayers, scores: Tensor) -> Tensor:
    """Return scores [T, E] with -infinity for experts outside a row's chosen groups."""
    if experts.groups == 1:
        return scores
    grouped = scores.unflatten(-1, (experts.groups, -1))
    best = grouped.topk(experts.group_best, dim=-1).values.sum(-1)
    chosen = best.topk(experts.top_groups, dim=-1).indices
    closed = torch.ones_like(best, dtype=torch.bool).scatter_(-1, chosen, False)
    return grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)
