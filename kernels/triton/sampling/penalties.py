"""Repetition, frequency and presence penalties on the tokens that occur."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import check_logits, check_vector
from kernels.triton.launch import launch

BLOCK = 256


@triton.jit
def penalise_kernel(
    logits, rows, ids, counts, repetition, frequency, presence, total,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of pairs,)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    row = tl.load(rows + at, mask=inside, other=0)
    place = logits + row * VOCAB + tl.load(ids + at, mask=inside, other=0)
    times = tl.load(counts + at, mask=inside, other=0.0)
    factor = tl.load(repetition + row, mask=inside, other=1.0)
    x = tl.load(place, mask=inside, other=0.0)
    x = tl.where(x > 0, x / factor, x * factor)
    x -= tl.load(frequency + row, mask=inside, other=0.0) * times
    x -= tl.where(times > 0, tl.load(presence + row, mask=inside, other=0.0), 0.0)
    tl.store(place, x, mask=inside)


def penalise(
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Penalise float32 logits [R, vocab] in place at n places, each named once.

    rows and ids int64 [n]; counts float32 [n], how often a token is in the output (0: only in the
    prompt); repetition, frequency and presence float32 [R], as OpenAI and CTRL (Keskar et al. 2019)
    define them.
    """
    count, vocab = check_logits(logits)
    check_vector("rows", rows, len(rows), torch.int64)
    check_vector("ids", ids, len(rows), torch.int64)
    check_vector("counts", counts, len(rows), torch.float32)
    for name, factor in (
        ("repetition", repetition), ("frequency", frequency), ("presence", presence),
    ):  # fmt: skip
        check_vector(name, factor, count, torch.float32)
    launch(
        penalise_kernel, (triton.cdiv(len(rows), BLOCK),), logits, rows, ids, counts, repetition,
        frequency, presence, len(rows), VOCAB=vocab, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
