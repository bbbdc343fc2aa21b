"""Compiling every kernel that serving may need before the first request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.contract.config import EngineConfig
from engine.models.adapters import DeviceHeads
from engine.models.decoder import NativeDecoder
from engine.worker.cuda.dispatcher import BatchDescriptor
from engine.worker.cuda.drafted import query_len
from engine.worker.cuda.inputs import StaticInputs
from engine.worker.cuda.lora_rows import slots_of
from engine.worker.cuda.setup import DeviceModel
from engine.worker.cuda.staging import send
from engine.worker.hidden import HiddenKeeper
from kernels import KernelSet
from kernels.logits import LogitEdits, PenalisedRows, TokenTable
from kernels.lora_slots import LoraRows, LoraSlots


@torch.inference_mode()
def warm_up_kernels(
    model: DeviceModel, config: EngineConfig, token_budget: int, max_blocks: int, groups: int,
    vocab_size: int,
) -> None:  # fmt: skip
    """Run prompts and batches of decodes of every size by twos, and all that chooses tokens.

    Kernels choose their tiles by numbers of tokens and of sequences, and compile at the first use
    of each, which takes a second or more: none of that shall fall to a request. Lengths need no
    warm-up, being no constants of any kernel. Nothing is written to the KV cache. Bridged models,
    which may keep a state, are left as they are.
    """
    _choose(model.ops, vocab_size)
    if not isinstance(model, NativeDecoder):
        return
    most = min(config.max_num_seqs, token_budget)
    slots = slots_of(model)
    inputs = StaticInputs(token_budget, most, max_blocks, groups, model.ops.device, slots)
    adapted: list[int] = []
    if slots is not None:
        # Adapters of experts have the tiles of these, which go by the number of rows.
        mixture = any(layer.experts is not None for layer in model.weights)
        adapted = _by_twos(token_budget) if mixture else [1, token_budget]
    for descriptor in _batches(token_budget, most, query_len(config), adapted):
        token_ids, context = inputs.rehearse(descriptor)
        # A table leads to the first block alone.
        inputs.seq_lens.fill_(min(config.block_size, descriptor.num_tokens // descriptor.num_reqs))
        hidden = model.forward(token_ids, context)[: descriptor.num_reqs]
        model.logits(hidden)
    if slots is not None:
        for rows in {1, most}:
            some = hidden.new_zeros((rows, hidden.shape[1]))
            model.logits(some, DeviceHeads(rows=_no_rows(slots, rows, some.device)))


@torch.inference_mode()
def warm_up_heads(keeper: HiddenKeeper, token_budget: int) -> None:
    """Have heads draw for rows of every size by twos, for the same reason; nothing is kept."""
    for count in _by_twos(token_budget):
        keeper.rehearse(count)


def _no_rows(slots: LoraSlots, count: int, device: torch.device) -> LoraRows:
    """Of a step of so many, in which nobody goes through an adapter."""
    sent = send(slots.sort([], count, padded=True), device)
    return LoraRows(*sent)


def _batches(
    token_budget: int, most: int, length: int, adapted: Sequence[int]
) -> Iterator[BatchDescriptor]:
    """Decodes of 1, 2, 4 ... `most` sequences, and prompts of 2, 4 ... `token_budget` tokens.

    Where drafts are checked, `length` tokens a sequence at most, some have fewer of them than
    others: decodes of 1, 2, 4 ... `length` tokens. Batches of `adapted` tokens go through adapters
    too.
    """
    for size in _by_twos(most):
        for each in _by_twos(length):
            if size * each <= token_budget:
                yield BatchDescriptor(size * each, size, True)
    for size in _by_twos(token_budget)[1:]:
        yield BatchDescriptor(size, 1, False)
    for size in adapted:
        yield BatchDescriptor(size, 1, size == 1, True)


def _by_twos(most: int) -> list[int]:
    """1, 2, 4 ... and `most`."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def _choose(ops: KernelSet, vocab_size: int) -> None:
    """Every way of choosing one row's token."""

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=ops.device)

    logits = zeros(1, vocab_size, dtype=torch.float32)
    if ops.edits is not None:
        _edit(ops.edits, logits)
    ops.argmax(logits)
    temperature = zeros(1, dtype=torch.float32) + 1.0
    top_k = zeros(1, dtype=torch.int64) + vocab_size
    half = zeros(1, dtype=torch.float64) + 0.5
    ops.sample(logits, temperature, top_k, half, half, half)


def _edit(edits: LogitEdits, logits: Tensor) -> None:
    """Bans, biases, masks, penalties and log probabilities of one row."""

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=logits.device)

    place = zeros(1, dtype=torch.int64)
    one = zeros(1, dtype=torch.float32) + 1.0
    edits.forbid(logits, place, place)
    edits.add(logits, place, place, one)
    words = zeros(1, -(-logits.shape[1] // 32), dtype=torch.int32)
    for forced in (None, zeros(1, dtype=torch.bool)):
        edits.keep(logits, place, words, forced)
    small = zeros(1, dtype=torch.int32)
    table = TokenTable(zeros(1, 256, dtype=torch.int32), zeros(1, 256, dtype=torch.int32))
    edits.record(table, zeros(4, 1, dtype=torch.int32))
    edits.penalise(logits, PenalisedRows(small, small, one, one, one), table, small)
    edits.token_logprobs(logits, place)
