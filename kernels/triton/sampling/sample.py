"""Sampling: one program a row, and no sort of the row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import check_logits, check_vector
from kernels.triton.launch import INTERPRETED, launch
from kernels.triton.sampling.passes import border, count_and_mass, draw, ordered_keys, row_range

#: A weight under 2^-149 of the largest is none in float32.
UNDERFLOW = tl.constexpr(104.0)
BLOCK = 64 if INTERPRETED else 1024
MOST = 16 if INTERPRETED else 1024
"""Logits that an interval of keys is narrowed down to, which are then sorted."""


@triton.jit
def argmax_kernel(out, logits, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows,)."""
    index = tl.program_id(0).to(tl.int64)
    top, first, _, broken = row_range(logits + index * VOCAB, VOCAB, BLOCK)
    good = (broken == 0) & (tl.abs(top) < float("inf"))
    tl.store(out + index, tl.where(good, first, -1).to(tl.int64))


@triton.jit
def sample_kernel(
    out, logits, scratch, temperature, top_k, top_p, min_p, uniforms,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). Each row takes only the passes that its own settings ask for."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * VOCAB
    scratch += index * MOST
    top, first, bottom, broken = row_range(row, VOCAB, BLOCK)
    heat = tl.load(temperature + index)
    token = first
    good = (broken == 0) & (tl.abs(top) < float("inf"))
    if good & (heat > 0):
        inverse = 1.4426950408889634 / heat
        least = tl.load(min_p + index)
        share = tl.load(top_p + index)
        most = tl.load(top_k + index)
        floor = tl.maximum(bottom, top - heat * UNDERFLOW)
        if least > 0:
            # min-p in logits: within temperature * log(1 / min_p) of the top.
            floor = tl.maximum(floor, (top + heat * tl.log(least)).to(tl.float32))
        key = ordered_keys(floor)
        count, mass = count_and_mass(row, key, top, inverse, VOCAB, BLOCK)
        ties = count
        if most < count:
            key, ties, mass = border(
                row, scratch, key, count, most, top, inverse, VOCAB, BLOCK, MOST, False
            )
            count = most.to(tl.int32)
        if share < 1.0:
            # From `key` on there may be more ties than top-k left: they come last in the order.
            inside, _ = count_and_mass(row, key, top, inverse, VOCAB, BLOCK)
            key, ties, mass = border(
                row, scratch, key, inside, mass * share, top, inverse, VOCAB, BLOCK, MOST, True
            )
        token = draw(row, key, ties, mass, top, inverse, tl.load(uniforms + index), VOCAB, BLOCK)
    tl.store(out + index, tl.where(good, token, -1).to(tl.int64))


def _block(vocab: int) -> int:
    return min(BLOCK, triton.next_power_of_2(vocab))


def argmax(logits: Tensor) -> Tensor:
    """See `KernelSet.argmax`."""
    rows, vocab = check_logits(logits)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    launch(argmax_kernel, (rows,), out, logits, VOCAB=vocab, BLOCK=_block(vocab), num_warps=8)
    return out


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> Tensor:
    """See `KernelSet.sample`.

    Weights are float32, their sums float64. A filter's border is searched among the values, an
    eighth of the interval a pass, until few enough logits are left to sort those: after
    "Dual-pivot rejection sampling" in FlashInfer (Ye et al. 2025), but exact.
    """
    rows, vocab = check_logits(logits)
    check_vector("temperature", temperature, rows, torch.float32)
    check_vector("top_k", top_k, rows, torch.int64)
    check_vector("top_p", top_p, rows, torch.float64)
    check_vector("min_p", min_p, rows, torch.float64)
    check_vector("uniforms", uniforms, rows, torch.float64)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    scratch = torch.empty((rows, MOST), dtype=torch.int32, device=logits.device)
    launch(
        sample_kernel, (rows,), out, logits, scratch, temperature, top_k, top_p, min_p, uniforms,
        VOCAB=vocab, BLOCK=_block(vocab), MOST=MOST, num_warps=8,
    )  # fmt: skip
    return out
