"""A step's inputs on the device: as tensors, or in fixed buffers that graphs read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.models.decoder import NativeDecoder
from engine.models.forward_context import AttentionMetadata
from engine.models.interface import EngineModel
from engine.models.lora import NO_ADAPTERS
from engine.worker.gpu.graph_dispatcher import BatchDescriptor
from kernels.lora import LoraMapping, LoraSlots
from kernels.tensors import to_device as send_one


class StaticLoraMapping:
    """Buffers at fixed addresses; none if the model's adapters have no slots."""

    def __init__(self, slots: LoraSlots | None, max_tokens: int, device: torch.device) -> None:
        """`max_tokens`: number of tokens of the largest graph."""
        self._slots, self._mapping = slots, None
        if slots is not None:
            rows, tiles = slots.mapping_lengths(max_tokens)
            sizes = (rows, tiles, 1)
            self._mapping = LoraMapping(
                *(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        mapping = self._mapping
        return 0 if mapping is None else sum(part.nbytes for part in _parts(mapping))

    def of(self, graph: BatchDescriptor) -> LoraMapping | None:
        """The buffers that a graph of this size reads; None: it runs no adapters."""
        mapping, slots = self._mapping, self._slots
        if mapping is None or slots is None or not graph.adapted:
            return None
        tiles, tile = slots.max_tiles(graph.num_tokens), slots.tile(graph.num_tokens)
        return LoraMapping(mapping.order[: tiles * tile], mapping.owners[:tiles], mapping.count)

    def fill(self, mapping: LoraMapping | None, graph: BatchDescriptor) -> None:
        """Copy a step's arrays that were padded for this graph, on the device."""
        static = self.of(graph)
        if static is not None and mapping is not None:
            torch._foreach_copy_(_parts(static), _parts(mapping))

    def clear(self) -> None:
        """Fill the buffers for a batch without adapters."""
        if self._mapping is not None:
            self._mapping.count.zero_()


def slots_of(model: EngineModel) -> LoraSlots | None:
    """The slots of the model's adapters; None: it has none."""
    return model.lora_slots if isinstance(model, NativeDecoder) else None


def _parts(rows: LoraMapping) -> list[torch.Tensor]:
    return [rows.order, rows.owners, rows.count]


_ALIGN = 16
"""Alignment in bytes: kernels may use vector loads of this size."""


def send(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Move the arrays to the device by one asynchronous copy.

    They lie in one allocation on both sides. The host's is pinned, and torch keeps it until the
    copy is complete; so no buffer of ours can be overwritten too early.
    """
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += -(-array.nbytes // _ALIGN) * _ALIGN
    host = torch.empty(total, dtype=torch.uint8, pin_memory=_is_accelerator(device))
    flat = host.numpy()
    for array, start in zip(arrays, starts, strict=True):
        part = flat[start : start + array.nbytes]
        part.view(array.dtype)[:] = array.ravel()
    buffer = host.to(device, non_blocking=True)
    return [
        buffer[start : start + array.nbytes].view(_dtype(array)).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def _is_accelerator(device: torch.device) -> bool:
    """Whether the host accesses the device's memory directly."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type


def _dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


class Download:
    """Tensors being copied to the host, on a separate stream."""

    def __init__(self, tensors: Sequence[Tensor], stream: torch.Stream | None) -> None:
        self._host: list[Tensor] = list(tensors)
        self._done: torch.Event | None = None
        if stream is None:
            return
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
        with stream:
            self._host = []
            for tensor in tensors:
                # Otherwise the next step could reuse its memory during the copy.
                tensor.record_stream(stream)
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._host.append(host.copy_(tensor, non_blocking=True))
            self._done = stream.record_event()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, once they have arrived."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


def copies(device: torch.device) -> torch.Stream | None:
    """A stream for `Download`; None if the host accesses the device's memory directly."""
    return torch.Stream(device) if _is_accelerator(device) else None


@dataclass(frozen=True, slots=True)
class SampledTokenFeed:
    """Token ids that the host doesn't know yet, because the previous step is sampling them.

    Attributes:
        source: int64 [num_tokens], on the host: index in `sampled` of each token's id; -1 if the
            host knows it.
        sampled: int64, on the device: the last token of each row of the running batch.
    """

    source: np.ndarray
    sampled: Tensor


_OPTIONAL = (
    "logits_rows", "sequence_rows", "prefill_start_loc", "plane_positions", "visible_ends",
)  # fmt: skip
"""Fields of a context that not every step has."""


@dataclass(frozen=True, slots=True)
class StagedInputs:
    """One step on the device.

    Attributes:
        token_ids: int64 [padded tokens].
        context: of the step's actual size; views of the following tensors.
        padded: the same for a graph: padding tokens write no keys, padding sequences have no
            tokens. Their block tables aren't padded.
        more: additional arrays.
    """

    token_ids: Tensor
    context: AttentionMetadata
    padded: AttentionMetadata
    more: list[Tensor]


def stage_inputs(
    token_ids: Tensor,
    context: AttentionMetadata,
    device: torch.device,
    to: BatchDescriptor | None = None,
    feed: SampledTokenFeed | None = None,
    more: Sequence[np.ndarray] = (),
    lora: Sequence[np.ndarray] = (),
) -> StagedInputs:
    """Copy everything at once, padded to a graph's size.

    Args:
        token_ids, context: on the host.
        to: the graph's size; None: there's no graph.
        more: additional arrays.
        lora: the vectors of `LoraMapping`, padded; empty: no token uses an adapter's slot.
    """
    count, reqs = len(token_ids), len(context.seq_lens)
    size = max(count, to.num_tokens) if to is not None else count
    seqs = max(reqs, to.num_reqs) if to is not None else reqs
    groups = context.groups
    arrays = [
        _padded(token_ids, size, 0),
        _padded(context.positions, size, 0),
        _padded(context.seq_lens, seqs, 0),
        _padded(context.query_start_loc, seqs + 1, count),
        *(_padded(group.slot_mapping, size, -1) for group in groups),
        *(group.block_tables.numpy() for group in groups),
    ]
    optional = [
        (name, getattr(context, name).numpy())
        for name in _OPTIONAL
        if getattr(context, name) is not None
    ]
    if to is not None and context.states is not None:
        # Block 0 may be a sequence's, but kernels write no states of sequences without tokens.
        optional.append(("state_rows", _padded(context.states.blocks, seqs, 0)))
    fed = [] if feed is None else [_padded(torch.from_numpy(feed.source), size, -1)]
    sent = send([*arrays, *(array for _, array in optional), *fed, *lora, *more], device)
    sent, also = sent[: len(sent) - len(more)], sent[len(sent) - len(more) :]
    sent, adapted = sent[: len(sent) - len(lora)], sent[len(sent) - len(lora) :]
    ids, positions, lens, starts = sent[:4]
    slots, tables = sent[4 : 4 + len(groups)], sent[4 + len(groups) : 4 + 2 * len(groups)]
    rest: dict[str, Any] = dict(
        zip((name for name, _ in optional), sent[4 + 2 * len(groups) :], strict=False)
    )
    if adapted:
        rest |= {"adapters": NO_ADAPTERS, "lora_rows": LoraMapping(*adapted)}
    if feed is not None:
        source = sent[-1]
        ids = torch.where(source >= 0, feed.sampled[source.clamp(min=0)], ids)
    contexts = [
        dataclasses.replace(
            group,
            positions=positions[:count],
            slot_mapping=slot[:count],
            block_tables=table,
            seq_lens=lens[:reqs],
            query_start_loc=starts[: reqs + 1],
            other_groups=(),
            **rest,
        )
        for group, slot, table in zip(groups, slots, tables, strict=True)
    ]
    padded_contexts = [
        dataclasses.replace(
            group, positions=positions, slot_mapping=slot, seq_lens=lens, query_start_loc=starts
        )
        for group, slot in zip(contexts, slots, strict=True)
    ]
    if context.embeds is not None:
        rows, values = context.embeds
        contexts[0].embeds = send_one(rows, device), send_one(values, device)
    if context.encoder_embeds is not None:
        rows, values = context.encoder_embeds  # vectors are on the device already
        contexts[0].encoder_embeds = send_one(rows, device), values
    contexts[0].host = context
    contexts[0].other_groups = tuple(contexts[1:])
    padded_contexts[0].other_groups = tuple(padded_contexts[1:])
    return StagedInputs(ids, contexts[0], padded_contexts[0], also)


def stage_eager(
    token_ids: Tensor, context: AttentionMetadata, device: torch.device, slots: LoraSlots | None
) -> StagedInputs:
    """The same without a graph; `slots`: of the model's adapters."""
    lora = context.adapters.sorted(slots, len(token_ids), padded=False)
    return stage_inputs(token_ids, context, device, lora=lora)


def _padded(tensor: Tensor, size: int, value: int) -> np.ndarray:
    """A host vector, extended by padding."""
    array = tensor.numpy()
    if len(array) >= size:
        return array
    longer = np.full(size, value, dtype=array.dtype)
    longer[: len(array)] = array
    return longer


class StaticInputBuffers:
    """Buffers at fixed addresses, filled before a graph is replayed.

    Args:
        max_tokens: number of tokens of the largest graph.
        max_seqs: maximum number of sequences of a batch.
        table_lengths: block table length of each KV cache group.
        slots: adapters' slots; None: the model has none.
    """

    def __init__(
        self, max_tokens: int, max_seqs: int, table_lengths: Sequence[int], device: torch.device,
        slots: LoraSlots | None = None,
    ) -> None:  # fmt: skip
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token_ids = zeros(max_tokens, dtype=torch.int64)
        self.positions = zeros(max_tokens, dtype=torch.int64)
        self.slots = [zeros(max_tokens, dtype=torch.int64).fill_(-1) for _ in table_lengths]
        self.tables = [zeros(max_seqs, length, dtype=torch.int32) for length in table_lengths]
        self.seq_lens = zeros(max_seqs, dtype=torch.int32)
        self.query_start_loc = zeros(max_seqs + 1, dtype=torch.int32)
        self.state_rows = zeros(max_seqs, dtype=torch.int64)
        self._lora = StaticLoraMapping(slots, max_tokens, device)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        vectors = [self.token_ids, self.positions, self.seq_lens, self.query_start_loc]
        vectors.append(self.state_rows)
        nbytes = sum(buffer.nbytes for buffer in (*vectors, *self.slots, *self.tables))
        return nbytes + self._lora.nbytes

    def fill(self, step: StagedInputs, to: BatchDescriptor) -> None:
        """Copy a batch that was padded for this graph, on the device."""
        size, groups = to.num_tokens, step.padded.groups
        wide = [self.token_ids[:size], self.positions[:size], *(s[:size] for s in self.slots)]
        sources = [step.token_ids, step.padded.positions, *(g.slot_mapping for g in groups)]
        torch._foreach_copy_(wide, sources)
        self._lora.fill(step.padded.lora_rows, to)
        if not to.num_reqs:
            return
        seqs = to.num_reqs
        torch._foreach_copy_(
            [self.seq_lens[:seqs], self.query_start_loc[: seqs + 1]],
            [step.padded.seq_lens, step.padded.query_start_loc],
        )
        if step.padded.state_rows is not None:
            self.state_rows[:seqs].copy_(step.padded.state_rows)
        for table, group in zip(self.tables, groups, strict=True):
            rows, width = group.block_tables.shape
            table[:rows, :width].copy_(group.block_tables)

    def dummy_inputs(self, of: BatchDescriptor) -> tuple[Tensor, AttentionMetadata]:
        """Fill in a harmless batch, and return its views.

        Nothing is written to the cache. If the graph doesn't fix the number of sequences, there are
        as many as needed for each to fit its block table, or the maximum of a batch.
        """
        self.token_ids.zero_()
        self.positions.zero_()
        self.state_rows.zero_()
        for slots in self.slots:
            slots.fill_(-1)
        for table in self.tables:
            table.zero_()
        max_seqs, width = self.tables[0].shape
        reqs = of.num_reqs or min(-(-of.num_tokens // width), max_seqs)
        share = -(-of.num_tokens // reqs)
        self.seq_lens.fill_(min(share, width))
        starts = (torch.arange(reqs + 1, dtype=torch.int32) * share).clamp(max=of.num_tokens)
        self.query_start_loc[: reqs + 1].copy_(starts)
        self._lora.clear()
        return self._views(of.num_tokens, reqs, self._lora.of(of))

    def _views(
        self, size: int, reqs: int, lora_rows: LoraMapping | None
    ) -> tuple[Tensor, AttentionMetadata]:
        """Token ids and context of a batch of this many tokens and sequences."""
        contexts = [
            AttentionMetadata(
                positions=self.positions[:size],
                slot_mapping=slots[:size],
                block_tables=table[:reqs],
                seq_lens=self.seq_lens[:reqs],
                query_start_loc=self.query_start_loc[: reqs + 1],
                lora_rows=lora_rows,
            )
            for slots, table in zip(self.slots, self.tables, strict=True)
        ]
        contexts[0].other_groups = tuple(contexts[1:])
        return self.token_ids[:size], contexts[0]
