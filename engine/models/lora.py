"""Adapters in a model's forward pass: which rows of a step have which adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels import KernelSet, LinearLayer
from kernels.interface import MixtureOfExperts, PerHeadLinear
from kernels.lora import (
    HEAD,
    ExpertUse,
    LoraMapping,
    LoraSegment,
    LoraSlots,
    LoraTable,
    LoraWeights,
    MoeLoraMapping,
    PackedLora,
    SlotTable,
    TableSegment,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingLora:
    """An adapter's change of an embedding's rows.

    Attributes:
        table: [vocabulary, hidden] that replaces the model's; None for the model's own.
        tokens: ids, int64 ascending, and rows [ids, hidden] that replace the table's.
        inner: [vocabulary, rank], whose rows are multiplied with `outer`; None if nothing is added.
        outer: [rank] to [hidden].
    """

    table: Tensor | None = None
    tokens: tuple[Tensor, Tensor] | None = None
    inner: Tensor | None = None
    outer: PackedLora | None = None

    def change(self, ops: KernelSet, x: Tensor, token_ids: Tensor, rows: Tensor) -> None:
        """Change rows of x [T, hidden], the embeddings of token_ids int64 [T]."""
        ids = token_ids[rows]
        if self.table is not None:
            x[rows] = self.table[ids].to(x.dtype)
        if self.tokens is not None:
            named, values = self.tokens
            indices = torch.searchsorted(named, ids).clamp(max=len(named) - 1)
            hit = named[indices] == ids
            x[rows[hit]] = values[indices[hit]].to(x.dtype)
        if self.inner is not None and self.outer is not None:
            embeddings = x[rows]
            every = torch.arange(len(rows))
            ops.add_lora(embeddings, self.inner[ids].to(x.dtype), [(self.outer, every)])
            x[rows] = embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLora:
    """An adapter's change of the logits.

    Attributes:
        table: replaces the model's output layer; None for the model's own.
        tokens: ids, and a layer that computes their logits instead of the output layer.
        added: [hidden] to [vocabulary]; None if nothing is added.
    """

    table: LinearLayer | None = None
    tokens: tuple[Tensor, LinearLayer] | None = None
    added: PackedLora | None = None

    def change(self, ops: KernelSet, logits: Tensor, hidden: Tensor, rows: Tensor) -> None:
        """Change rows of float32 logits [R, vocabulary] of hidden [R, hidden]."""
        self.replace(logits, hidden, rows)
        if self.added is not None:
            ops.add_lora(logits, hidden, [(self.added, rows)])

    @property
    def replaces(self) -> bool:
        """Whether it replaces the output layer or some of its rows."""
        return self.table is not None or self.tokens is not None

    def replace(self, logits: Tensor, hidden: Tensor, rows: Tensor) -> None:
        """Apply the replacements, but not `added`."""
        if self.table is not None:
            logits[rows] = self.table(hidden[rows]).float()
        if self.tokens is not None and len(rows):
            ids, layer = self.tokens
            logits[rows.unsqueeze(1), ids] = layer(hidden[rows]).float()


#: The slot of the layer that computes keys and values of an encoder's states, once for all tokens.
CROSS_KV = "cross_kv"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterWeights:
    """An adapter on the device of its model.

    Attributes:
        digest: the adapter's identity.
        layers: its weights by layer and slot (see `engine.lora.target_modules.layer_linears`).
        table: these weights for the compiled decoder, or the adapter's slot; None for neither.
        embedding, head: None if it doesn't change these.
        classifier: replaces a pooling model's head, on the host.
        vision: its weights in a vision tower and its connector, by layers' names.
        vocab_size: the vocabulary size of its rows if it adds tokens; only its `head` then computes
            their logits. 0 for the model's.
        num_bytes: its size in device memory.
    """

    digest: str
    layers: Sequence[Mapping[str, PackedLora]]
    table: LoraTable | None = None
    embedding: EmbeddingLora | None = None
    head: HeadLora | None = None
    classifier: Callable[[Tensor], Tensor] | None = None
    vision: Mapping[str, PackedLora] = field(default_factory=dict)
    vocab_size: int = 0
    num_bytes: int = 0

    @property
    def changes_encoder(self) -> bool:
        """Whether it changes what is computed from an encoder's input, once for all tokens."""
        return bool(self.vision) or any(CROSS_KV in layer for layer in self.layers)

    @property
    def is_compiled(self) -> bool:
        """Whether steps with it can run in one call."""
        return self.table is not None and self.embedding is None and self.head is None


class StepAdapters:
    """The rows of a step with adapters, each with at most one. False if there are none.

    Attributes:
        groups: adapters and their rows, int64 ascending.
    """

    __slots__ = ("groups",)

    def __init__(self, groups: list[tuple[AdapterWeights, Tensor]]) -> None:
        self.groups = groups

    def __bool__(self) -> bool:
        return bool(self.groups)

    @property
    def vocab_size(self) -> int:
        """The largest vocabulary of an adapter that adds tokens; 0 if none does."""
        return max((adapter.vocab_size for adapter, rows in self.groups if len(rows)), default=0)

    def tables(self) -> list[TableSegment] | None:
        """Return them for the compiled decoder; None if it can't run one of them."""
        uses = [(adapter.table, rows) for adapter, rows in self.groups if adapter.table is not None]
        return uses if len(uses) == len(self.groups) else None

    def sorted(self, slots: LoraSlots | None, size: int, *, padded: bool) -> list[np.ndarray]:
        """Sort the rows of adapters in slots by `LoraSlots.sort`; [] without slots or adapters."""
        if slots is None or not self.groups:
            return []
        slot_rows = [
            (adapter.table.slot, rows.numpy())
            for adapter, rows in self.groups
            if isinstance(adapter.table, SlotTable)
        ]
        return slots.sort(slot_rows, size, padded=padded)

    def segments(self, layer: int, slot: str) -> list[LoraSegment]:
        """Return the adapters of a linear layer with their rows."""
        return [
            (adapter.layers[layer][slot], rows)
            for adapter, rows in self.groups
            if slot in adapter.layers[layer]
        ]

    def of_experts(self, layer: int, slots: Set[str]) -> list[ExpertUse]:
        """Return the adapters of any of the `slots` of a layer's experts with their rows."""
        uses = (
            ({slot: lora for slot, lora in adapter.layers[layer].items() if slot in slots}, rows)
            for adapter, rows in self.groups
        )
        return [(changed, rows) for changed, rows in uses if changed]

    def lm_head_adapters(self, rows: Tensor | None) -> StepAdapters:
        """Return the adapters of logits with indices among `rows` of the step (None for all)."""
        changing = [
            (adapter, adapter_rows)
            for adapter, adapter_rows in self.groups
            if adapter.head is not None
        ]
        adapters = StepAdapters(changing)
        return adapters if rows is None else adapters.for_rows(rows)

    def for_rows(self, rows: Tensor) -> StepAdapters:
        """Return the adapters of some rows with indices among these."""
        return _with_rows(
            (one, torch.isin(rows, adapter_rows).nonzero().flatten())
            for one, adapter_rows in self.groups
        )

    def permuted(self, positions: Tensor) -> StepAdapters:
        """Return the adapters after row i was moved to positions[i], int64."""
        return StepAdapters([(one, positions[rows].sort().values) for one, rows in self.groups])

    def slice_rows(self, start: int, end: int) -> StepAdapters:
        """Return the adapters of rows [start, end) with indices from start."""
        return _with_rows(
            (one, rows[(rows >= start) & (rows < end)] - start) for one, rows in self.groups
        )


#: No row has an adapter.
NO_ADAPTERS = StepAdapters([])


def _with_rows(groups: Iterable[tuple[AdapterWeights, Tensor]]) -> StepAdapters:
    """Drop adapters without rows, since their vocabulary may differ."""
    return StepAdapters([(one, rows) for one, rows in groups if len(rows)])


@dataclass(slots=True)
class DeviceHeads:
    """Changes of rows of logits by adapters in slots, without synchronizing with the device.

    Attributes:
        heads: replacements of the model's output layer, and their rows, int64.
        rows: rows that adapters add to; None if no adapter adds anything.
        vocab_size: the vocabulary size of all rows if their adapters add tokens; 0 for the model's.
    """

    heads: Sequence[tuple[HeadLora, Tensor]] = ()
    rows: LoraMapping | None = None
    vocab_size: int = 0

    def change(self, slots: LoraSlots, layer: int, logits: Tensor, hidden: Tensor) -> None:
        """Change float32 logits [R, vocabulary] of hidden [R, hidden]. `layer` is the index after
        the last layer.
        """
        for head, rows in self.heads:
            head.replace(logits, hidden, rows)
        if self.rows is not None:
            slots.add((layer, HEAD), logits, hidden, self.rows)


class LinearWithAddition(LinearLayer):
    """A linear layer to whose outputs something is added; its rows and tensors stay the same."""

    def __init__(self, ops: KernelSet, layer: LinearLayer) -> None:
        self._ops, self._layer = ops, layer
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.nbytes = layer.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        return self._layer.rows(ids)

    def tensors(self) -> dict[str, Tensor]:
        return self._layer.tensors()


class LoraLinear(LinearWithAddition):
    """Adds adapters' outputs to the rows that a step assigns to them."""

    def __init__(
        self, ops: KernelSet, layer: LinearLayer, target: tuple[int, str], step: LoraContext
    ) -> None:
        """`target`: the index of its layer, and its slot."""
        super().__init__(ops, layer)
        self._target, self._step = target, step

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `LinearLayer.__call__`."""
        y = self._layer(x, out)
        step = self._step
        if step.slots is not None and step.rows is not None:
            step.slots.add(self._target, y, x, step.rows)
        elif step.adapters and (uses := step.adapters.segments(*self._target)):
            self._ops.add_lora(y, x, uses)
        return y


class LowRankLinear(LinearWithAddition):
    """Adds low-rank weights of its own, `added`, to all rows of a shared linear layer."""

    def __init__(self, ops: KernelSet, layer: LinearLayer, added: PackedLora) -> None:
        super().__init__(ops, layer)
        self.layer, self.added = layer, added
        self.nbytes += added.nbytes

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = self._layer(x, out)
        self._ops.add_lora(y, x, [(self.added, torch.arange(len(x)))])
        return y


class LatentLora(PackedLora):
    """An adapter's addition to each head's projections from latents to keys and values, scale * B
    A, absorbed into queries and outputs like the weight itself.

    A head's query is multiplied by its rows of B, then by A; its weighted sum of latents by A, then
    by its rows of B.
    """

    def __init__(self, ops: KernelSet, lora: LoraWeights, key_size: int, value_size: int) -> None:
        """`lora`: with one part, without gain and shift; the rows of its b are by head `key_size`
        rows of keys, then `value_size` rows of values.
        """
        (part,) = lora.parts
        self.rank, self.in_features = lora.a.shape
        self.out_features, self._scale = lora.out_features, part.scale

        def pack(weight: Tensor) -> LinearLayer:
            return ops.PackedLinear(weight.contiguous(), round_inputs=lora.round_inputs)

        by_head = part.b.unflatten(0, (-1, key_size + value_size))
        keys, values = by_head.split((key_size, value_size), dim=1)
        self._key_down = ops.head_linears([pack(head.T) for head in keys])
        self._key_up, self._value_down = pack(lora.a.T), pack(lora.a)
        self._value_up = ops.head_linears([pack(head) for head in values])
        parts = (self._key_down, self._key_up, self._value_down, self._value_up)
        self.nbytes = sum(part.nbytes for part in parts)

    def queries(self, x: Tensor) -> Tensor:
        """Return [T, heads, latent] to be added to queries for x [T, heads, key_size]."""
        low = x.new_empty((*x.shape[:2], self.rank))
        self._key_down(x, low)
        return self._key_up(low.flatten(0, 1)).unflatten(0, low.shape[:2]) * self._scale

    def values(self, x: Tensor) -> Tensor:
        """Return [T, heads, value_size] to be added to values for sums x [T, heads, latent]."""
        low = self._value_down(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        out = x.new_empty((*x.shape[:2], self._value_up.layers[0].out_features))
        self._value_up(low, out)
        return out * self._scale


class LoraHeads(PerHeadLinear):
    """Each head's products with latents, with the additions of adapters to the rows that a step
    assigns to them.
    """

    def __init__(
        self,
        layer: PerHeadLinear,
        target: tuple[int, str],
        step: LoraContext,
        added: Callable[[LatentLora, Tensor], Tensor],
    ) -> None:
        """`added`: `LatentLora.queries` or `LatentLora.values`."""
        super().__init__(layer.layers)
        self._layer, self._target, self._step, self._added = layer, target, step, added

    def __call__(self, x: Tensor, out: Tensor) -> None:
        self._layer(x, out)
        if self._step.adapters:
            for lora, rows in self._step.adapters.segments(*self._target):
                if not isinstance(lora, LatentLora):
                    raise TypeError("an adapter of latents must be packed as one")
                out[rows] += self._added(lora, x[rows])


class LoraMoe(MixtureOfExperts):
    """A mixture of experts that adds adapters' outputs to the rows that a step assigns to them."""

    def __init__(self, experts: MixtureOfExperts, layer: int, step: LoraContext) -> None:
        """`layer`: the index of its layer."""
        self._experts, self._layer, self._step = experts, layer, step
        self.layers, self.nbytes = experts.layers, experts.nbytes
        self._slots = frozenset() if self.layers is None else frozenset(self.layers.linears())

    def __call__(self, x: Tensor) -> Tensor:
        step = self._step
        if step.slots is not None and step.rows is not None:
            return self._experts.forward_with_slots(
                x, MoeLoraMapping(step.slots, self._layer, step.rows)
            )
        uses = step.adapters.of_experts(self._layer, self._slots)
        return self._experts.forward_with_adapters(x, uses) if uses else self._experts(x)

    def tensors(self) -> dict[str, Tensor]:
        return self._experts.tensors()


@dataclass(slots=True)
class LoraContext:
    """A step's adapters for layers that run one by one. Used by one call at a time.

    Attributes:
        adapters: the adapters of all of the step's tokens.
        slots: the adapters on the model's device, if they have slots.
        rows: the step's tokens by slot; None if no token has one.
    """

    adapters: StepAdapters = NO_ADAPTERS
    slots: LoraSlots | None = None
    rows: LoraMapping | None = None
