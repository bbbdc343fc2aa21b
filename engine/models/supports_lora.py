"""`SupportsLoRA`: a model with layers that adapters can change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.forward_context import AttentionMetadata
from engine.models.layers.linear import FusedLinear
from engine.models.layers.weights import LatentWeights, LayerWeights
from engine.models.lora import CROSS_KV, NO_ADAPTERS, DeviceHeads, LoraContext, StepAdapters
from kernels import KernelSet, LinearLayer
from kernels.interface import AttentionWeights
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

#: The maximum number of a linear layer's parts with separate ranks of an adapter; 1 for others.
_PARTS = {
    "qkv": 3,
    "latent_in": 2,
    "state_in": 6,
    "up": 2,
    "residual_up": 2,
    "shared_up": 2,
    EXPERTS["up"]: 2,
    CROSS_KV: 2,
}


def linears_of(weights: LayerWeights) -> dict[str, LinearLayer]:
    """Return the linear layers for every token by slot."""
    linears: dict[str, LinearLayer | None] = {}
    for mixer in (weights.attention, weights.state):
        if isinstance(mixer, AttentionWeights):
            linears |= {"qkv": mixer.qkv, "o": mixer.o}
        elif isinstance(mixer, LatentWeights):
            linears |= {"latent_in": mixer.inputs, "latent_q": mixer.queries, "o": mixer.o}
            if (index := mixer.index) is not None:
                linears |= {"index_q": index.queries, "index_k": index.keys}
                linears["index_weights"] = index.weights
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
    if (cross := weights.cross) is not None:
        linears |= {"cross_q": cross.queries, CROSS_KV: cross.kv, "cross_o": cross.output}
    return {slot: linear for slot, linear in linears.items() if linear is not None}


@dataclass(frozen=True, slots=True)
class LinearSizes:
    """The sizes of a layer that doesn't run separately: an expert in a tensor of all experts, or a
    layer that is absorbed into others.

    Attributes:
        in_features, out_features: see `LinearLayer`.
    """

    in_features: int
    out_features: int

    @property
    def row_size(self) -> int:
        """See `LinearLayer.row_size`."""
        return self.in_features


#: A layer that an adapter can change, with its weights, or only its sizes.
AdaptableLinear = LinearLayer | LinearSizes


def latent_heads(weights: LayerWeights) -> dict[str, LinearSizes]:
    """Return the sizes of the projection from latents to keys and values, which is absorbed."""
    mixer = weights.attention
    if not isinstance(mixer, LatentWeights):
        return {}
    sizes = mixer.latents
    rows = len(mixer.into.layers) * (sizes.qk_nope_head_dim + sizes.value_size)
    return {"latent_heads": LinearSizes(sizes.kv_lora_rank, rows)}


def expert_linears(weights: LayerWeights) -> dict[str, LinearLayer]:
    """Return a mixture's layers if they run one by one."""
    experts = weights.experts
    return {} if experts is None or experts.layers is None else experts.layers.linears()


def stacked_linears(
    weights: LayerWeights, experts: Mapping[str, FusedLinear]
) -> dict[str, AdaptableLinear]:
    """Return a mixture's layers if its experts run together; `experts` are each one's by slot."""
    every = {} if weights.experts is None else weights.experts.shared_linears()
    return every | {
        slot: LinearSizes(linear.columns, linear.rows) for slot, linear in experts.items()
    }


def slot_names(weights: LayerWeights) -> list[str]:
    """Return a layer's slots on devices with CUDA graphs."""
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
    """Return slots for `max_adapters` adapters, with up to `max_rank` for each part, of the layers'
    slots, the embedding and the output layer; None if the kernels have no slots. `dtype` is that of
    the layers' weights, `experts` the number of experts in a mixture.
    """
    targets = {
        (index, slot): _PARTS.get(slot, 1) for index, layer in enumerate(layers) for slot in layer
    }
    targets |= {(len(layers), end): 1 for end in (EMBEDDING, EMBEDDING_ROWS, HEAD)}
    return ops.lora_slots(targets, max_adapters, max_rank, ops.activation_dtype(dtype), experts)


class SupportsLoRA(ABC):
    """Base class of models with adapters.

    Attributes:
        ops, weight_dtype: the kernels, and the dtype of linear weights.
        lora_slots: adapters on a device with CUDA graphs; None if they have no slots.
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
        """Return a layer's linear layers that adapters may change, by slot."""

    @abstractmethod
    def _slot_names(self) -> list[list[str]]:
        """Return each layer's slots on devices with CUDA graphs."""

    @property
    def _num_experts(self) -> int:
        """Number of experts in a layer; 0 for none."""
        return 0

    @property
    def lora_slots(self) -> LoraSlots | None:
        """See the class."""
        return self._step.slots

    def make_lora_slots(self, max_adapters: int, max_rank: int) -> LoraSlots | None:
        """Return slots for this many adapters of up to this rank; None if the kernels have none."""
        return make_slots(
            self.ops,
            self._slot_names(),
            max_adapters,
            max_rank,
            self.weight_dtype,
            self._num_experts,
        )

    def use_lora_slots(self, slots: LoraSlots | None) -> None:
        """Use these slots for adapters, see `make_lora_slots`."""
        self._step.slots = slots

    def lora_table(self, layers: LayerLoras) -> LoraTable | None:
        """Return an adapter's slot, or its weights for running all layers in one call; None if
        neither is supported.
        """
        return None if self.lora_slots is None else self.lora_slots.put(layers)

    @staticmethod
    def _permute_adapters(
        context: AttentionMetadata, positions: Callable[[], Tensor]
    ) -> tuple[StepAdapters, LoraMapping | None]:
        """Return both forms of the step's adapters after token i is moved to `positions()[i]`,
        int64.
        """
        adapters, rows = context.adapters, context.lora_rows
        moved = adapters.permuted(positions()) if adapters else adapters
        return moved, None if rows is None else rows.moved(positions())

    @contextmanager
    def _lora_context(self, adapters: StepAdapters, rows: LoraMapping | None) -> Iterator[None]:
        """Set the step's adapters for the layers that run one by one."""
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
