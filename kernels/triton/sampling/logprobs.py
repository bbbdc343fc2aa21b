"""Log probabilities of chosen tokens, and their ranks, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import check_logits, check_vector
from kernels.triton.launch import launch

BLOCK = 2048
#: Blocks of a row that are on their way while one is looked at: a processor has one row, and one
#: block alone would leave most of the memory's bandwidth unused.
AHEAD = tl.constexpr(8)


@triton.jit
def logprobs_kernel(
    out, normalizers, ranks, logits, tokens, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (rows,): an online sum of exponentials, and a count of what is likelier."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * VOCAB
    chosen = tl.load(row + tl.load(tokens + index))
    lanes = tl.arange(0, BLOCK)
    tops = tl.full((BLOCK,), -1.0e38, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    above = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=AHEAD):
        at = start + lanes
        x = tl.load(row + at, mask=at < VOCAB, other=float("-inf"))
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
