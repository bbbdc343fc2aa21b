"""A step's inputs on the device: as they are, or in buffers that graphs read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.models.adapters import NO_ADAPTERS
from engine.models.context import AttentionContext
from engine.sampling.transfer import to_device as send_one
from engine.worker.cuda.dispatcher import BatchDescriptor
from engine.worker.cuda.lora_rows import StaticLoraRows
from engine.worker.cuda.staging import send
from kernels.lora_slots import LoraRows, LoraSlots


@dataclass(frozen=True, slots=True)
class Feed:
    """Token ids that the host doesn't know yet, because the step before is sampling them.

    Attributes:
        source: int64 [num_tokens], on the host: the place in `sampled` of each token's id; -1 where
            the host knows it.
        sampled: int64, on the device: the last token of each row of the running batch.
    """

    source: np.ndarray
    sampled: Tensor


@dataclass(frozen=True, slots=True)
class Staged:
    """One step on the device.

    Attributes:
        token_ids: int64 [padded tokens].
        context: of the step's own size; views of what follows.
        padded: the same for a graph: tokens that pad write no keys, sequences that do have no
            tokens. Their block tables aren't padded.
        more: what was sent along.
    """

    token_ids: Tensor
    context: AttentionContext
    padded: AttentionContext
    more: list[Tensor]


def stage(
    token_ids: Tensor,
    context: AttentionContext,
    device: torch.device,
    to: BatchDescriptor | None = None,
    feed: Feed | None = None,
    more: Sequence[np.ndarray] = (),
    lora: Sequence[np.ndarray] = (),
) -> Staged:
    """Everything in one copy, padded to a graph's size.

    Args:
        token_ids, context: on the host.
        to: the graph's size; None: there's no graph.
        more: sent along.
        lora: the vectors of `LoraRows`, padded; none: nobody goes through an adapter's slot.
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
        for name in ("logits_rows", "sequence_rows", "prefill_start_loc")
        if getattr(context, name) is not None
    ]
    fed = [] if feed is None else [_padded(torch.from_numpy(feed.source), size, -1)]
    there = send([*arrays, *(array for _, array in optional), *fed, *lora, *more], device)
    there, also = there[: len(there) - len(more)], there[len(there) - len(more) :]
    there, adapted = there[: len(there) - len(lora)], there[len(there) - len(lora) :]
    ids, positions, lens, starts = there[:4]
    slots, tables = there[4 : 4 + len(groups)], there[4 + len(groups) : 4 + 2 * len(groups)]
    rest: dict[str, Any] = dict(
        zip((name for name, _ in optional), there[4 + 2 * len(groups) :], strict=False)
    )
    if adapted:
        rest |= {"adapters": NO_ADAPTERS, "lora_rows": LoraRows(*adapted)}
    if feed is not None:
        source = there[-1]
        ids = torch.where(source >= 0, feed.sampled[source.clamp(min=0)], ids)
    own = [
        dataclasses.replace(
            group,
            positions=positions[:count],
            slot_mapping=slot[:count],
            block_tables=table,
            seq_lens=lens[:reqs],
            query_start_loc=starts[: reqs + 1],
            others=(),
            **rest,
        )
        for group, slot, table in zip(groups, slots, tables, strict=True)
    ]
    whole = [
        dataclasses.replace(
            group, positions=positions, slot_mapping=slot, seq_lens=lens, query_start_loc=starts
        )
        for group, slot in zip(own, slots, strict=True)
    ]
    if context.embeds is not None:
        places, values = context.embeds
        own[0].embeds = send_one(places, device), send_one(values, device)
    own[0].host = context
    own[0].others, whole[0].others = tuple(own[1:]), tuple(whole[1:])
    return Staged(ids, own[0], whole[0], also)


def stage_all(
    token_ids: Tensor, context: AttentionContext, device: torch.device, slots: LoraSlots | None
) -> Staged:
    """The same where there is no graph; `slots`: of the model's adapters."""
    lora = context.adapters.sorted(slots, len(token_ids), padded=False)
    return stage(token_ids, context, device, lora=lora)


def _padded(tensor: Tensor, size: int, value: int) -> np.ndarray:
    """A vector of the host, lengthened."""
    array = tensor.numpy()
    if len(array) >= size:
        return array
    longer = np.full(size, value, dtype=array.dtype)
    longer[: len(array)] = array
    return longer


class StaticInputs:
    """Buffers at fixed addresses, filled before a graph is replayed.

    Args:
        max_tokens: of the largest graph.
        max_seqs: sequences of a batch.
        max_blocks: of one sequence.
        groups: KV cache groups.
        slots: of adapters; None: the model has none.
    """

    def __init__(
        self, max_tokens: int, max_seqs: int, max_blocks: int, groups: int, device: torch.device,
        slots: LoraSlots | None = None,
    ) -> None:  # fmt: skip
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token_ids = zeros(max_tokens, dtype=torch.int64)
        self.positions = zeros(max_tokens, dtype=torch.int64)
        self.slots = [zeros(max_tokens, dtype=torch.int64).fill_(-1) for _ in range(groups)]
        self.tables = [zeros(max_seqs, max_blocks, dtype=torch.int32) for _ in range(groups)]
        self.seq_lens = zeros(max_seqs, dtype=torch.int32)
        self.query_start_loc = zeros(max_seqs + 1, dtype=torch.int32)
        self._lora = StaticLoraRows(slots, max_tokens, device)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        whole = [self.token_ids, self.positions, self.seq_lens, self.query_start_loc]
        own = sum(buffer.nbytes for buffer in (*whole, *self.slots, *self.tables))
        return own + self._lora.nbytes

    def fill(self, step: Staged, to: BatchDescriptor) -> None:
        """Copy a batch in that was padded for this graph; on the device alone."""
        size, groups = to.num_tokens, step.padded.groups
        wide = [self.token_ids[:size], self.positions[:size], *(s[:size] for s in self.slots)]
        made = [step.token_ids, step.padded.positions, *(g.slot_mapping for g in groups)]
        torch._foreach_copy_(wide, made)
        self._lora.fill(step.padded.lora_rows, to)
        if not to.num_reqs:
            return
        seqs = to.num_reqs
        torch._foreach_copy_(
            [self.seq_lens[:seqs], self.query_start_loc[: seqs + 1]],
            [step.padded.seq_lens, step.padded.query_start_loc],
        )
        for table, group in zip(self.tables, groups, strict=True):
            rows, width = group.block_tables.shape
            table[:rows, :width].copy_(group.block_tables)

    def rehearse(self, of: BatchDescriptor) -> tuple[Tensor, AttentionContext]:
        """Fill in a batch that is harmless to run, and its views.

        Nothing is written. Where the graph leaves the number of sequences open, there are as many
        as it takes for none to be longer than its block table, or all that a batch may have.
        """
        self.token_ids.zero_()
        self.positions.zero_()
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
        self, size: int, reqs: int, lora_rows: LoraRows | None
    ) -> tuple[Tensor, AttentionContext]:
        """Token ids and context of a batch of so many tokens and sequences."""
        contexts = [
            AttentionContext(
                positions=self.positions[:size],
                slot_mapping=slots[:size],
                block_tables=table[:reqs],
                seq_lens=self.seq_lens[:reqs],
                query_start_loc=self.query_start_loc[: reqs + 1],
                lora_rows=lora_rows,
            )
            for slots, table in zip(self.slots, self.tables, strict=True)
        ]
        contexts[0].others = tuple(contexts[1:])
        return self.token_ids[:size], contexts[0]
