"""`SupportsLoRA`: a model whose layers adapters may change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.forward_context import AttentionMetadata
from engine.models.layers.linear import (
    AttentionWeights,
    FusedLinear,
    LatentWeights,
    LayerWeights,
)
from engine.models.lora import NO_ADAPTERS, DeviceHeads, LoraContext, StepAdapters
from kernels import KernelSet, LinearLayer
from kernels.lora import (
    EMBEDDING,
    EMBEDDING_ROWS,
    EXPERTS,
    HEAD,
    LayerLoras,
    LoraMapping,
    LoraSlots,
    LoraTable,
)

#: Parts of a linear layer, at most, of which each has an adapter's ranks to itself; else 1.
_PARTS = {
    "qkv": 3,
    "latent_in": 2,
    "state_in": 6,
    "up": 2,
    "residual_up": 2,
    "shared_up": 2,
    EXPERTS["up"]: 2,
}


def linears_of(weights: LayerWeights) -> dict[str, LinearLayer]:
    """Those that every token goes through, by their slots."""
    linears: dict[str, LinearLayer | None] = {}
    for mixer in (weights.attention, weights.state):
        if isinstance(mixer, AttentionWeights):
            linears |= {"qkv": mixer.qkv, "o": mixer.o}
        elif isinstance(mixer, LatentWeights):
            linears |= {"latent_in": mixer.inputs, "latent_q": mixer.queries, "o": mixer.o}
        elif mixer is not None:
            linears |= {
                "state_in": mixer.inputs,
                "state_selection": mixer.selection,
                "state_rates": mixer.rates,
                "state_gates": mixer.gates,
                "state_out": mixer.output,
            }
    for prefix, mlp in (("", weights.mlp), ("residual_", weights.residual_mlp)):
        if mlp is not None:
            linears |= {f"{prefix}up": mlp.up, f"{prefix}down": mlp.down}
    return {slot: linear for slot, linear in linears.items() if linear is not None}


@dataclass(frozen=True, slots=True)
class LinearSizes:
    """A layer that is run with others alone: an expert where all of them are one tensor, or what is
    taken into other products.

    Attributes:
        in_features, out_features: as of a `LinearLayer`.
    """

    in_features: int
    out_features: int

    @property
    def row_size(self) -> int:
        """See `LinearLayer.row_size`."""
        return self.in_features


#: What an adapter changes: a layer that can be asked for its weights, or the sizes of one.
AdaptableLinear = LinearLayer | LinearSizes


def latent_heads(weights: LayerWeights) -> dict[str, LinearSizes]:
    """What makes each head's keys and values of latents: taken into other products."""
    mixer = weights.attention
    if not isinstance(mixer, LatentWeights):
        return {}
    sizes = mixer.latents
    rows = len(mixer.into.layers) * (sizes.qk_nope_head_dim + sizes.value_size)
    return {"latent_heads": LinearSizes(sizes.kv_lora_rank, rows)}


def expert_linears(weights: LayerWeights) -> dict[str, LinearLayer]:
    """Those of a mixture, where they run one by one."""
    experts = weights.experts
    return {} if experts is None or experts.layers is None else experts.layers.linears()


def stacked_linears(
    weights: LayerWeights, experts: Mapping[str, FusedLinear]
) -> dict[str, AdaptableLinear]:
    """Those of a mixture whose experts run together; `experts`: each one's, by their slots."""
    every = {} if weights.experts is None else weights.experts.shared_linears()
    return every | {
        slot: LinearSizes(linear.columns, linear.rows) for slot, linear in experts.items()
    }


def slot_names(weights: LayerWeights) -> list[str]:
    """A layer's slots on a device whose steps are recorded."""
    names = list(linears_of(weights))
    if weights.experts is not None:
        names += [*weights.experts.shared_linears(), *EXPERTS.values()]
    return names


def make_slots(
    ops: KernelSet,
    layers: Sequence[Sequence[str]],
    max_adapters: int,
    max_rank: int,
    dtype: torch.dtype,
    experts: int = 0,
) -> LoraSlots | None:
    """Slots for `max_adapters` adapters of these layers, each by the names of its linear layers, of
    the embedding and of the output layer, each part of up to `max_rank`; None: the kernels have no
    slots. `dtype`: of the layers' weights. A mixture has so many `experts`.
    """
    targets = {
        (index, slot): _PARTS.get(slot, 1) for index, layer in enumerate(layers) for slot in layer
    }
    targets |= {(len(layers), end): 1 for end in (EMBEDDING, EMBEDDING_ROWS, HEAD)}
    return ops.lora_slots(targets, max_adapters, max_rank, ops.activation_dtype(dtype), experts)


class SupportsLoRA(ABC):
    """What such models have in common.

    Attributes:
        ops, weight_dtype: the kernels, and how linear weights are kept.
        lora_slots: where adapters are on a device whose steps are recorded; None: they have no
            slots.
    """

    ops: KernelSet
    weight_dtype: torch.dtype

    def __init__(self) -> None:
        self._step = LoraContext()

    @property
    @abstractmethod
    def _depth(self) -> int:
        """Number of layers."""

    @abstractmethod
    def lora_linears(self, layer: int) -> Mapping[str, AdaptableLinear]:
        """A layer's linear layers that adapters may change, by their slots."""

    @abstractmethod
    def _slot_names(self) -> list[list[str]]:
        """The slots of each layer on a device whose steps are recorded."""

    @property
    def _num_experts(self) -> int:
        """Of a layer; 0: there are none."""
        return 0

    @property
    def lora_slots(self) -> LoraSlots | None:
        """See the class."""
        return self._step.slots

    def make_lora_slots(self, max_adapters: int, max_rank: int) -> LoraSlots | None:
        """Slots for this many adapters of up to that rank; None: the kernels support none."""
        return make_slots(
            self.ops,
            self._slot_names(),
            max_adapters,
            max_rank,
            self.weight_dtype,
            self._num_experts,
        )

    def use_lora_slots(self, slots: LoraSlots | None) -> None:
        """Have adapters there, see `make_lora_slots`."""
        self._step.slots = slots

    def lora_table(self, layers: LayerLoras) -> LoraTable | None:
        """An adapter's slot, or what takes it through all layers in one call; None: neither is
        there.
        """
        return None if self.lora_slots is None else self.lora_slots.put(layers)

    @staticmethod
    def _permute_adapters(
        context: AttentionMetadata, positions: Callable[[], Tensor]
    ) -> tuple[StepAdapters, LoraMapping | None]:
        """The step's adapters, with token i at `positions()[i]`, int64; in both ways."""
        adapters, rows = context.adapters, context.lora_rows
        moved = adapters.permuted(positions()) if adapters else adapters
        return moved, None if rows is None else rows.moved(positions())

    @contextmanager
    def _lora_context(self, adapters: StepAdapters, rows: LoraMapping | None) -> Iterator[None]:
        """Meanwhile the layers that run one by one know of the step's adapters."""
        self._step.adapters, self._step.rows = adapters, rows
        try:
            yield
        finally:
            self._step.adapters, self._step.rows = NO_ADAPTERS, None

    def _adapt_embedding(
        self, x: Tensor, token_ids: Tensor, adapters: StepAdapters, rows: LoraMapping | None
    ) -> None:
        """Change rows of x [T, hidden], the embeddings of token_ids int64 [T]."""
        for adapter, adapter_rows in adapters.groups:
            if adapter.embedding is not None:
                adapter.embedding.change(self.ops, x, token_ids, adapter_rows)
        if self.lora_slots is not None and rows is not None:
            self.lora_slots.embed(self._depth, x, token_ids, rows)

    def _adapt_logits(
        self, logits: Tensor, hidden: Tensor, adapters: StepAdapters | DeviceHeads
    ) -> None:
        """Change rows of float32 logits [R, vocabulary] of hidden [R, hidden]."""
        if isinstance(adapters, StepAdapters):
            for adapter, rows in adapters.groups:
                if adapter.head is not None:
                    adapter.head.change(self.ops, logits, hidden, rows)
        elif self.lora_slots is not None:
            adapters.change(self.lora_slots, self._depth, logits, hidden)
