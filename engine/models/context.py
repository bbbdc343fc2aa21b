"""What attention needs to know of a step's batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.models.adapters import NO_ADAPTERS, StepAdapters
from kernels.lora_slots import LoraRows


@dataclass(slots=True)
class AttentionContext:
    """The batch of one step, flattened over its tokens, for the layers of one KV cache group.

    Attributes:
        positions: int64 [num_tokens].
        slot_mapping: int64 [num_tokens], where each token's KV goes: block * block_size + offset.
        block_tables: int32 [num_seqs, max_blocks].
        seq_lens: int32 [num_seqs], KV tokens of each sequence, this step's included.
        query_start_loc: int32 [num_seqs + 1], where each sequence's tokens begin.
        logits_rows: int64 [num_rows], the tokens whose logits are wanted, or None for all.
        sequence_rows: int64 [num_seqs], which row of the running batch each sequence has while it
            runs: for models that carry a state.
        embeds: (tokens of the step, int64 [n]; float32 [n, hidden] in the place of their rows of
            the embedding table), or None. Only a model with `takes_embeds` gets any.
        num_decodes: so many of the first sequences have one token each, and none after them has;
            0 where nobody put them first.
        prefill_start_loc: int32 [num_seqs - num_decodes + 1], where the other sequences' tokens
            begin among theirs; None where there are no decodes, or nothing else.
        others: the same for groups 1, 2, ... of a model whose layers attend in different ways; they
            differ in slot_mapping and block_tables.
        adapters: which of the tokens go through adapters.
        lora_rows: the same for a model whose adapters have slots, on its device.
        host: of a batch on a device, the same where the host can look at it; None: it can.
    """

    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    logits_rows: Tensor | None = None
    sequence_rows: Tensor | None = None
    num_decodes: int = 0
    prefill_start_loc: Tensor | None = None
    others: tuple[AttentionContext, ...] = ()
    embeds: tuple[Tensor, Tensor] | None = None
    adapters: StepAdapters = NO_ADAPTERS
    lora_rows: LoraRows | None = None
    host: AttentionContext | None = None

    @property
    def groups(self) -> tuple[AttentionContext, ...]:
        """The contexts of all KV cache groups."""
        return (self, *self.others)
