"""Forbidden and favoured tokens: at single places, and by a bit for each token of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import check_logits, check_vector, describe
from kernels.triton.launch import launch

BLOCK = 256
WIDE_BLOCK = 4096


@triton.jit(do_not_specialize=("total",))
def place_edit_kernel(
    logits, rows, ids, values, total, VOCAB: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (blocks of places,)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    row = tl.load(rows + at, mask=inside, other=0)
    place = logits + row * VOCAB + tl.load(ids + at, mask=inside, other=0)
    if ADD:
        x = tl.load(place, mask=inside, other=0.0)
        tl.store(place, x + tl.load(values + at, mask=inside, other=0.0), mask=inside)
    else:
        tl.store(place, tl.full((BLOCK,), float("-inf"), tl.float32), mask=inside)


@triton.jit
def bitmask_kernel(
    logits, rows, bits, forced, words, VOCAB: tl.constexpr, FORCED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (masked rows, blocks of the vocabulary); logits themselves needn't be read."""
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < VOCAB
    row = logits + tl.load(rows + index) * VOCAB
    word = tl.load(bits + index * words + at // 32, mask=inside, other=0)
    kept = (word >> (at % 32)) & 1 != 0
    tl.store(row + at, tl.full((BLOCK,), float("-inf"), tl.float32), mask=inside & ~kept)
    if FORCED:  # noqa: SIM102  FORCED is decided when the kernel is compiled
        if tl.load(forced + index) != 0:
            tl.store(row + at, tl.zeros((BLOCK,), tl.float32), mask=inside & kept)


def _edit(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor | None) -> None:
    _, vocab = check_logits(logits)
    check_vector("rows", rows, len(rows), torch.int64)
    check_vector("ids", ids, len(rows), torch.int64)
    launch(
        place_edit_kernel, (triton.cdiv(len(rows), BLOCK),), logits, rows, ids, values, len(rows),
        VOCAB=vocab, ADD=values is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def forbid(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """See `LogitEdits.forbid`."""
    _edit(logits, rows, ids, None)


def add(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """See `LogitEdits.add`."""
    check_vector("values", values, len(rows), torch.float32)
    _edit(logits, rows, ids, values)


def keep(logits: Tensor, rows: Tensor, bits: Tensor, forced: Tensor | None) -> None:
    """See `LogitEdits.keep`."""
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
