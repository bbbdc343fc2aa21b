"""Loads a mixture of experts from a checkpoint's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.models.layers.linear import MoeBlock
from engine.models.layers.moe import GroupedMoe, fuses_experts, read_experts, split_experts
from engine.quantization.packing import DenseSource, WeightSource, stays_small
from kernels import LinearLayer
from kernels.interface import ActivationSpec, ExpertLayers, MixtureOfExperts
from kernels.layers import AbsentLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from engine.models.weight_loader import WeightLoader

Expert = tuple[LinearLayer, LinearLayer]
"""Gate over up, and down."""


class ExpertLoader:
    """Loads one layer's experts, whose linear layers are packed by `loader`."""

    def __init__(
        self, loader: WeightLoader, block: MoeBlock, requested: Collection[int] | None = None
    ) -> None:
        """`requested`: experts to load; None for the initial ones of this rank."""
        self._requested = requested
        self._loader, self._block, self._moe = loader, block, block.moe
        self._shard, self._expert_shard = loader.shard, loader.expert_shard
        self._hidden = loader.spec.hidden_size

    def load(self) -> MixtureOfExperts:
        """Load the router, the experts and the shared expert."""
        loader, block, moe = self._loader, self._block, self._moe
        spec, ops = loader.spec, loader.ops
        router = loader.linear(block.router)
        shared = None if block.shared is None else loader.mlp(block.shared)
        gate = None if block.shared_gate is None else loader.linear(block.shared_gate)
        bias = None
        if moe.choice_bias:
            bias = loader.vector(block.layer + moe.choice_bias, moe.num_experts)
        small = loader.scheme.layers is not None or self._keeps_format()
        if fuses_experts(ops, spec, small):
            read = read_experts(loader.weights, block.layer, moe, self._hidden)
            fused = GroupedMoe(
                ops, router, read, moe, loader.dtype, spec.activation, shared, gate, bias
            )
            loader.weights.release()
            return fused
        experts = self.experts()
        shard = self._expert_shard
        return ops.compile_experts(
            ExpertLayers(
                router=router,
                gate_up=[gate_up for gate_up, _ in experts],
                down=[down for _, down in experts],
                top_k=moe.top_k,
                softmax_first=moe.softmax_first,
                renormalize=moe.renormalize,
                sigmoid=moe.sigmoid,
                choice_bias=bias,
                scale=moe.scale,
                groups=moe.groups,
                top_groups=moe.top_groups,
                group_best=moe.group_best,
                activation=ActivationSpec(
                    spec.activation, spec.activation_limit, spec.activation_alpha
                ),
                shared_gate_up=None if shared is None else shared.up,
                shared_down=None if shared is None else shared.down,
                shared_gate=gate,
                ranks=None if shard is None else shard.ranks,
                owners=() if shard is None else shard.owners(moe.num_experts),
                row_ranks=0 if shard is None else shard.row_ranks,
            )
        )

    def experts(self) -> list[Expert]:
        """Return all experts of the layer; those that aren't requested are `AbsentLinear`."""
        return self._streamed() or self._from_tensors()

    def _keeps_format(self) -> bool:
        """Return whether the kernels multiply directly by the checkpoint's quantized weights of
        experts with separate tensors. The first expert represents all of them.
        """
        loader, moe = self._loader, self._moe
        inner, hidden = moe.intermediate_size, self._hidden
        first = f"{self._block.layer}{moe.experts}0"
        if moe.layout != "split" or not loader.has_packed(f"{first}.{moe.expert_names[0]}"):
            return False
        shapes = (inner, hidden), (inner, hidden), (hidden, inner)
        return all(
            stays_small(loader.ops, loader.weight_source(f"{first}.{name}", *shape))
            for name, shape in zip(moe.expert_names, shapes, strict=True)
        )

    def _streamed(self) -> list[Expert]:
        """Return experts that have separate tensors; otherwise [].

        Rows are read in parts, and quantized weights stay in their format.
        """
        loader, moe = self._loader, self._moe
        if moe.layout == "interleaved":
            return self._interleaved(f"{self._block.layer}{moe.experts}")
        prefix = split_experts(self._block.layer, moe)
        inner, (gate, up, down) = moe.intermediate_size, moe.expert_names
        if not prefix or not loader.has_weight(f"{prefix}0.{gate}"):
            return []

        def read(index: int) -> Expert:
            ups = [f"{prefix}{index}.{name}" for name in (gate, up)]
            downs = [f"{prefix}{index}.{down}"]
            up_sources = [loader.weight_source(name, inner, self._hidden) for name in ups]
            down_sources = [loader.weight_source(name, self._hidden, inner) for name in downs]
            return self._pack((up_sources, None, None, ups), (down_sources, None, downs))

        return self._local_experts(read)

    def _interleaved(self, prefix: str) -> list[Expert]:
        """Return experts that are packed together, with alternating gate and up; otherwise []."""
        loader, moe, hidden = self._loader, self._moe, self._hidden
        if not loader.has_packed(f"{prefix}gate_up_proj#0"):
            return []
        count, inner = moe.num_experts, moe.intermediate_size
        turns = torch.arange(2 * inner).view(inner, 2).T.flatten()
        up_biases = loader.tensor(f"{prefix}gate_up_proj_bias", (count, 2 * inner)).float()
        up_biases = up_biases[:, turns]
        down_biases = loader.tensor(f"{prefix}down_proj_bias", (count, hidden)).float()

        def read(index: int) -> Expert:
            up, down = f"{prefix}gate_up_proj#{index}", f"{prefix}down_proj#{index}"
            up_sources = [loader.weight_source(up, 2 * inner, hidden)]
            down_sources = [loader.weight_source(down, hidden, inner)]
            return self._pack(
                (up_sources, up_biases[index], turns, [up]),
                (down_sources, down_biases[index], [down]),
            )

        return self._local_experts(read)

    def _from_tensors(self) -> list[Expert]:
        """Return experts whose tensors are read whole."""
        read = read_experts(self._loader.weights, self._block.layer, self._moe, self._hidden)
        return [
            self._pack(([DenseSource(up)], up_bias, None, ()), ([DenseSource(down)], down_bias, ()))
            if self._is_local(index)
            else self._absent()
            for index, (up, up_bias, down, down_bias) in enumerate(read)
        ]

    def _local_experts(self, read: Callable[[int], Expert]) -> list[Expert]:
        return [
            read(index) if self._is_local(index) else self._absent()
            for index in range(self._moe.num_experts)
        ]

    def _is_local(self, index: int) -> bool:
        """Return whether this rank has an expert or a part of it."""
        shard = self._expert_shard
        if shard is None:
            return True
        if self._requested is None:
            owners = shard.owners(self._moe.num_experts)
            self._requested = {
                expert for expert, ranks in enumerate(owners) if shard.ranks.rank in ranks
            }
        return index in self._requested

    def _absent(self) -> Expert:
        hidden, inner = self._hidden, self._moe.intermediate_size
        return AbsentLinear(hidden, 2 * inner), AbsentLinear(inner, hidden)

    def _pack(
        self,
        up: tuple[list[WeightSource], Tensor | None, Tensor | None, Sequence[str]],
        down: tuple[list[WeightSource], Tensor | None, Sequence[str]],
    ) -> Expert:
        """Pack an expert from (matrices, bias, order, names) of up, and the same without order of
        down.
        """
        loader, shard, inner = self._loader, self._shard, self._moe.intermediate_size
        scheme = loader.scheme.layers
        (ups, up_bias, order, up_names), (downs, down_bias, down_names) = up, down
        if shard is None or self._expert_shard is not None:  # the expert isn't split
            return (
                loader.pack_sources(ups, up_bias, scheme, order, up_names),
                loader.pack_sources(downs, down_bias, scheme, names=down_names),
            )
        rows = shard.up_rows(inner, gated=True)
        return (
            loader.pack_rows(ups, up_bias, rows, scheme, order, up_names),
            loader.pack_shared(downs, down_bias, scheme, None, down_names, shard.inner(inner)),
        )
