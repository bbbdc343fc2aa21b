"""Edits of logits: bans, biases, bitmasks and penalties; log probabilities."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.logit_edits import PenaltyRows, TokenTable
from kernels.tensors import check_logits, check_vector, describe
from kernels.triton.launch import launch

BLOCK = 2048
#: Blocks that are loaded ahead: a processor has one row, and one block at a time would leave most
#: of the memory bandwidth unused.
AHEAD = tl.constexpr(8)


@triton.jit
def logprobs_kernel(
    out, normalizers, ranks, logits, tokens, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """An online logsumexp, and the number of larger logits. Grid (rows,)."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * VOCAB
    chosen = tl.load(row + tl.load(tokens + index))
    lanes = tl.arange(0, BLOCK)
    tops = tl.full((BLOCK,), -1.0e38, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    above = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=AHEAD):
        ids = start + lanes
        x = tl.load(row + ids, mask=ids < VOCAB, other=float("-inf"))
        higher = tl.maximum(tops, x)
        sums = sums * tl.exp(tops - higher) + tl.exp(x - higher)
        tops = higher
        above += (x > chosen).to(tl.int32)
    top = tl.max(tops, 0)
    total = tl.sum(sums * tl.exp(tops - top), 0)
    normalizer = top + tl.log(total)
    tl.store(out + index, chosen - normalizer)
    tl.store(normalizers + index, normalizer)
    tl.store(ranks + index, (tl.sum(above, 0) + 1).to(tl.int64))


def token_logprobs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `LogitEdits.token_logprobs`."""
    rows, vocab = check_logits(logits)
    check_vector("tokens", tokens, rows, torch.int64)
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    normalizers = torch.empty_like(out)
    ranks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    launch(
        logprobs_kernel, (rows,), out, normalizers, ranks, logits, tokens, VOCAB=vocab,
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab)), num_warps=8,
    )  # fmt: skip
    return out, normalizers, ranks


# Token tables stay on the device with a slot per sequence; a step writes only its changes.

PENALTIES_BLOCK = 512


@triton.jit(
    do_not_specialize=(
        "capacity",
        "total",
    )
)
def record_kernel(ids, counts, changes, capacity, total, BLOCK: tl.constexpr):
    """Grid (blocks of changes,)."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < total
    slot = tl.load(changes + offsets, mask=inside, other=0).to(tl.int64)
    indexes = slot * capacity + tl.load(changes + total + offsets, mask=inside, other=0)
    tl.store(
        ids + indexes, tl.load(changes + 2 * total + offsets, mask=inside, other=0), mask=inside
    )
    tl.store(
        counts + indexes, tl.load(changes + 3 * total + offsets, mask=inside, other=0), mask=inside
    )


@triton.jit
def penalize_kernel(
    logits, rows, slots, lengths, repetition, frequency, presence, ids, counts, capacity,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (penalized rows, blocks of a slot)."""
    index = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < tl.load(lengths + index)
    slot = tl.load(slots + index).to(tl.int64) * capacity
    token = tl.load(ids + slot + offsets, mask=inside, other=0)
    times = tl.load(counts + slot + offsets, mask=inside, other=0).to(tl.float32)
    factor = tl.load(repetition + index)
    pointers = logits + tl.load(rows + index).to(tl.int64) * VOCAB + token
    x = tl.load(pointers, mask=inside, other=0.0)
    x = tl.where(x > 0, x / factor, x * factor)
    x -= tl.load(frequency + index) * times
    x -= tl.where(times > 0, tl.load(presence + index), 0.0)
    tl.store(pointers, x, mask=inside)


def _check_table(table: TokenTable) -> int:
    shape = table.ids.shape
    for part in (table.ids, table.counts):
        if part.dim() != 2 or part.shape != shape or part.dtype != torch.int32:
            raise ValueError(f"a table's {describe(part)} must be int32 [slots, capacity]")
        if not part.is_contiguous():
            raise ValueError("a table must be contiguous")
    return shape[1]


def record(table: TokenTable, changes: Tensor) -> None:
    """See `LogitEdits.update_token_table`."""
    capacity = _check_table(table)
    if changes.dim() != 2 or len(changes) != 4 or changes.dtype != torch.int32:
        raise ValueError(f"changes {describe(changes)} must be int32 [4, m]")
    total = changes.shape[1]
    launch(
        record_kernel, (triton.cdiv(total, PENALTIES_BLOCK),), table.ids, table.counts,
        changes.contiguous(),
        capacity, total, BLOCK=PENALTIES_BLOCK, num_warps=4,
    )  # fmt: skip


def penalize(logits: Tensor, penalized: PenaltyRows, table: TokenTable, lengths: Tensor) -> None:
    """See `LogitEdits.apply_penalties`."""
    _, vocab = check_logits(logits)
    capacity, count = _check_table(table), len(penalized.rows)
    for name, ints in (
        ("rows", penalized.rows), ("slots", penalized.slots), ("lengths", lengths),
    ):  # fmt: skip
        check_vector(name, ints, count, torch.int32)
    for name in ("repetition", "frequency", "presence"):
        check_vector(name, getattr(penalized, name), count, torch.float32)
    launch(
        penalize_kernel, (count, triton.cdiv(capacity, PENALTIES_BLOCK)), logits, penalized.rows,
        penalized.slots, lengths, penalized.repetition, penalized.frequency, penalized.presence,
        table.ids, table.counts, capacity, VOCAB=vocab, BLOCK=PENALTIES_BLOCK, num_warps=4,
    )  # fmt: skip


LOGIT_EDITS_BLOCK = 256
WIDE_BLOCK = 4096


@triton.jit(do_not_specialize=("total",))
def edit_kernel(
    logits, rows, ids, values, total, VOCAB: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (blocks of places,)."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < total
    row = tl.load(rows + offsets, mask=inside, other=0)
    pointers = logits + row * VOCAB + tl.load(ids + offsets, mask=inside, other=0)
    if ADD:
        x = tl.load(pointers, mask=inside, other=0.0)
        tl.store(pointers, x + tl.load(values + offsets, mask=inside, other=0.0), mask=inside)
    else:
        tl.store(pointers, tl.full((BLOCK,), float("-inf"), tl.float32), mask=inside)


@triton.jit
def bitmask_kernel(
    logits, rows, bits, forced, words, VOCAB: tl.constexpr, FORCED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply bitmasks without reading the logits. Grid (masked rows, blocks of the vocabulary)."""
    index = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < VOCAB
    row = logits + tl.load(rows + index) * VOCAB
    word = tl.load(bits + index * words + ids // 32, mask=inside, other=0)
    allowed = (word >> (ids % 32)) & 1 != 0
    tl.store(row + ids, tl.full((BLOCK,), float("-inf"), tl.float32), mask=inside & ~allowed)
    if FORCED:  # noqa: SIM102  FORCED is decided when the kernel is compiled
        if tl.load(forced + index) != 0:
            tl.store(row + ids, tl.zeros((BLOCK,), tl.float32), mask=inside & allowed)


def _edit(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor | None) -> None:
    _, vocab = check_logits(logits)
    check_vector("rows", rows, len(rows), torch.int64)
    check_vector("ids", ids, len(rows), torch.int64)
    launch(
        edit_kernel, (triton.cdiv(len(rows), LOGIT_EDITS_BLOCK),), logits, rows, ids, values,
        len(rows),
        VOCAB=vocab, ADD=values is not None, BLOCK=LOGIT_EDITS_BLOCK, num_warps=4,
    )  # fmt: skip


def forbid(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """See `LogitEdits.mask_tokens`."""
    _edit(logits, rows, ids, None)


def add(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """See `LogitEdits.add_bias`."""
    check_vector("values", values, len(rows), torch.float32)
    _edit(logits, rows, ids, values)


def keep(logits: Tensor, rows: Tensor, bits: Tensor, forced: Tensor | None) -> None:
    """See `LogitEdits.apply_bitmask`."""
    _, vocab = check_logits(logits)
    check_vector("rows", rows, len(rows), torch.int64)
    if bits.dim() != 2 or bits.dtype != torch.int32 or not bits.is_contiguous():
        raise ValueError(f"bits {describe(bits)} must be contiguous int32 [rows, words]")
    if len(bits) != len(rows) or bits.shape[1] * 32 < vocab:
        raise ValueError(f"bits {describe(bits)} are too few for {len(rows)} rows of {vocab}")
    if forced is not None:
        check_vector("forced", forced, len(rows), torch.bool)
    block = min(WIDE_BLOCK, triton.next_power_of_2(vocab))
    launch(
        bitmask_kernel, (len(rows), triton.cdiv(vocab, block)), logits, rows, bits, forced,
        bits.shape[1], VOCAB=vocab, FORCED=forced is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
