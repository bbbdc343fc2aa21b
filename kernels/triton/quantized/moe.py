"""A mixture of experts with quantized layers, as two grouped products.

Like `group_traffic.fused_experts` for float weights, it doesn't wait for the device, so a step can
be recorded in a CUDA graph.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kernels.interface import ExpertLayers, LinearLayer, MixtureOfExperts
from kernels.layers import GatedKernels, gated_activation
from kernels.lora import MoeLoraMapping, SharedExpertLora
from kernels.moe import bytes_read, check_experts
from kernels.triton.launch import INTERPRETED
from kernels.triton.moe.fused_moe import MAX_EXPERTS, AddedToExperts, add_up, route
from kernels.triton.moe.grouped_gemm import align, tile_rows
from kernels.triton.quantized.linear import QuantizedLinear, SortedRows

MAX_ROWS = 64
"""Maximum rows of a tile."""


def stackable(layers: Sequence[LinearLayer]) -> bool:
    """Return whether the layers share a format and shapes, and none reorders its inputs."""

    def form(layer: QuantizedLinear) -> object:
        tensors = {name: (part.shape, part.dtype) for name, part in layer.tensors().items()}
        return type(layer), layer.in_features, layer.out_features, tensors

    if not all(isinstance(layer, QuantizedLinear) and layer.order is None for layer in layers):
        return False
    first, *rest = (form(cast(QuantizedLinear, layer)) for layer in layers)
    return all(other == first for other in rest)


class StackedLinear:
    """One layer of all experts, with the tensors of its format stacked."""

    def __init__(self, layers: Sequence[LinearLayer]) -> None:
        self._stacked = copy.copy(cast(QuantizedLinear, layers[0]))
        for name, first in self._stacked.tensors().items():
            stacked = torch.empty(
                (len(layers), *first.shape), dtype=first.dtype, device=first.device
            )
            for index, layer in enumerate(layers):
                stacked[index].copy_(getattr(layer, name))
            setattr(self._stacked, name, stacked)

    def tensors(self) -> dict[str, Tensor]:
        """Return the layer's tensors, [experts, ...] each."""
        return self._stacked.tensors()

    def __call__(self, x: Tensor, by: SortedRows, dtype: torch.dtype) -> Tensor:
        """Return [rows of `by`, N]; each row belongs to an expert."""
        return self._stacked.sorted_product(x, by, dtype)


class GroupedExperts(MixtureOfExperts):
    """`ExpertLayers` of one quantized format.

    Args:
        tile: fixes the rows per tile and the order of sums for any T; None chooses by T.
    """

    def __init__(self, ops: GatedKernels, experts: ExpertLayers, tile: int | None = None) -> None:
        """Raises ValueError for inconsistent layers; see `stackable`."""
        check_experts(experts)
        self._router, self._top_k = experts.router, experts.top_k
        self._choice: dict[str, Any] = {
            "softmax_first": experts.softmax_first, "renormalize": experts.renormalize,
            "sigmoid": experts.sigmoid, "scale": experts.scale, "groups": experts.groups,
            "top_groups": experts.top_groups, "group_best": experts.group_best,
        }  # fmt: skip
        self._choice_bias = experts.choice_bias
        self._shared_up, self._shared_down = experts.shared_gate_up, experts.shared_down
        self._shared_gate = experts.shared_gate
        self._act, self._tile = gated_activation(ops, experts.activation), tile
        self._count, self.nbytes = len(experts.gate_up), bytes_read(experts)
        self._up, self._down = StackedLinear(experts.gate_up), StackedLinear(experts.down)

    def shared_linears(self) -> dict[str, LinearLayer]:
        layers = {
            "router": self._router, "shared_up": self._shared_up,
            "shared_down": self._shared_down, "shared_gate": self._shared_gate,
        }  # fmt: skip
        return {slot: layer for slot, layer in layers.items() if layer is not None}

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x, None)

    def forward_with_slots(self, x: Tensor, rows: MoeLoraMapping) -> Tensor:
        return self._run(x, rows)

    def _run(self, x: Tensor, lora: MoeLoraMapping | None) -> Tensor:
        tokens, top_k, every = len(x), self._top_k, SharedExpertLora(lora)
        weights, ids = route(
            every("router", self._router, x), top_k, choice_bias=self._choice_bias, **self._choice
        )
        groups = align(ids.flatten(), self._count, self._rows(tokens * top_k))
        both = self._up(x, SortedRows(groups, top_k, None), x.dtype)
        if lora is None:
            expert_outputs = self._down(
                self._act(both), SortedRows(groups, 1, weights.view(-1)), torch.float32
            )
        else:
            adding = AddedToExperts(lora, groups, tokens, top_k)
            gated = self._act(adding.up(both, x))
            expert_outputs = adding.down(
                self._down(gated, SortedRows(groups, 1, None), torch.float32), gated
            )
            expert_outputs.mul_(weights.view(-1, 1))
        out = add_up(
            expert_outputs.view(tokens, top_k, x.shape[1]), x.dtype, in_order=self._tile is not None
        )
        if self._shared_up is None or self._shared_down is None:
            return out
        up = self._act(every("shared_up", self._shared_up, x))
        shared_output, gate = every("shared_down", self._shared_down, up), self._shared_gate
        if gate is not None:
            shared_output = torch.sigmoid(every("shared_gate", gate, x)) * shared_output
        return out.add_(shared_output)

    def _rows(self, rows: int) -> int:
        if self._tile is not None and not INTERPRETED:
            return min(MAX_ROWS, self._tile)
        return min(MAX_ROWS, tile_rows(rows, self._count))

    def tensors(self) -> dict[str, Tensor]:
        layers: dict[str, LinearLayer | StackedLinear | None] = {
            "router": self._router, "gate_up": self._up, "down": self._down,
            "shared.gate_up": self._shared_up, "shared.down": self._shared_down,
            "shared.gate": self._shared_gate,
        }  # fmt: skip
        tensors = {
            f"{name}.{part}": tensor
            for name, layer in layers.items()
            if layer is not None
            for part, tensor in layer.tensors().items()
        }
        bias = self._choice_bias
        return tensors if bias is None else {**tensors, "choice_bias": bias}


def grouped_experts(
    ops: GatedKernels, experts: ExpertLayers, tile: int | None = None
) -> MixtureOfExperts | None:
    """Return the experts as grouped products; None unless they share a quantized format."""
    if not experts.gate_up or len(experts.gate_up) > MAX_EXPERTS:
        return None
    if not (stackable(experts.gate_up) and stackable(experts.down)):
        return None
    return GroupedExperts(ops, experts, tile)
