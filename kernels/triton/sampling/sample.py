"""Sampling without a sort of the row: by several programs a row, and where these can't tell, by
one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import check_logits, check_vector
from kernels.triton.launch import INTERPRETED, launch
from kernels.triton.sampling.candidates import choose_kernel, gather_kernel
from kernels.triton.sampling.chunks import LOG2E, SETTLED, UNDERFLOW, scan_kernel, settle_kernel
from kernels.triton.sampling.passes import border, count_and_mass, draw, ordered_keys, row_range

CHUNK = 64 if INTERPRETED else 2048
"""Logits of a row that a program reads."""
GROUPS = 8 if INTERPRETED else 32
"""Groups of a chunk, of which the largest logits are known."""
ENOUGH = 8 if INTERPRETED else 512
"""So many of a row's largest logits are looked at, where fewer aren't known to do."""
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
    out, logits, scratch, ints, temperature, top_k, top_p, min_p, uniforms,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): rows that aren't settled yet, each by the passes that its own settings need."""
    index = tl.program_id(0).to(tl.int64)
    if tl.load(ints + index * (CHUNKS + 2) + CHUNKS) == SETTLED:
        return
    row = logits + index * VOCAB
    scratch += index * MOST
    top, first, bottom, broken = row_range(row, VOCAB, BLOCK)
    heat = tl.load(temperature + index)
    token = first
    good = (broken == 0) & (tl.abs(top) < float("inf"))
    if good & (heat > 0):
        inverse = LOG2E / heat
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

    Weights are float32, their sums float64. One pass finds the largest logits of small groups; that
    is all for rows without filters. For the others it gives a threshold at or above which top-k's
    or top-p's border lies, so that only the few logits there are collected and sorted. In rows that
    are too flat for that a border is searched among the values, an eighth of the interval a pass,
    until few enough logits are left to sort those: after "Dual-pivot rejection sampling" in
    FlashInfer (Ye et al. 2025), but exact.
    """
    rows, vocab = check_logits(logits)
    check_vector("temperature", temperature, rows, torch.float32)
    check_vector("top_k", top_k, rows, torch.int64)
    check_vector("top_p", top_p, rows, torch.float64)
    check_vector("min_p", min_p, rows, torch.float64)
    check_vector("uniforms", uniforms, rows, torch.float64)
    device = logits.device
    chunks = triton.cdiv(vocab, CHUNK)
    cut = {"VOCAB": vocab, "CHUNK": CHUNK, "CHUNKS": chunks, "GROUPS": GROUPS}
    padded = triton.next_power_of_2(chunks)
    settings = (temperature, top_k, top_p, min_p, uniforms)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    floats = torch.empty((rows, chunks * (2 + GROUPS)), dtype=torch.float32, device=device)
    ints = torch.empty((rows, chunks + 2), dtype=torch.int32, device=device)
    found = torch.empty((rows, MOST), dtype=torch.int64, device=device)
    launch(scan_kernel, (chunks, rows), floats, ints, logits, temperature, **cut, num_warps=4)
    launch(
        settle_kernel, (rows,), out, floats, ints, logits, *settings, **cut, PADDED=padded,
        ENOUGH=ENOUGH, num_warps=8,
    )  # fmt: skip
    launch(
        gather_kernel, (chunks, rows), found, floats, ints, logits, **cut, MOST=MOST, num_warps=4
    )
    launch(
        choose_kernel, (rows,), out, found, floats, ints, *settings, VOCAB=vocab, CHUNKS=chunks,
        GROUPS=GROUPS, PADDED=padded, MOST=MOST, num_warps=8,
    )  # fmt: skip
    # What was collected of rows that it didn't settle is of no use any more.
    launch(
        sample_kernel, (rows,), out, logits, found.view(torch.int32), ints, *settings,
        VOCAB=vocab, CHUNKS=chunks, BLOCK=_block(vocab), MOST=MOST, num_warps=8,
    )  # fmt: skip
    return out
