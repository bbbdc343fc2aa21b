"""Choosing each token's experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import describe
from kernels.triton.launch import launch

MOST_EXPERTS = 1024


@triton.jit
def route_kernel(
    weights,
    ids,
    scores,
    stride,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    SOFTMAX_FIRST: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """Grid (tokens,): the largest score, TOP_K times; equal ones by id upwards."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    score = tl.load(
        scores + token * stride + expert, mask=expert < EXPERTS, other=float("-inf")
    ).to(tl.float32)
    top = tl.max(score, 0)
    shares = tl.exp(score - top)
    total = tl.sum(shares, 0)
    left = score
    places = tl.arange(0, PLACES)
    found = tl.zeros((PLACES,), tl.int32)
    parts = tl.zeros((PLACES,), tl.float32)
    for place in tl.static_range(TOP_K):
        best = tl.max(left, 0)
        index = tl.min(tl.where((left == best) & (expert < EXPERTS), expert, PADDED), 0)
        # Of scores that are no numbers none is the best: even then ids name experts that are there.
        index = tl.minimum(index, EXPERTS - 1)
        found = tl.where(places == place, index, found)
        parts = tl.where(places == place, tl.exp(best - top), parts)
        left = tl.where(expert == index, float("-inf"), left)
    # Softmax over the chosen alone is what renormalising a softmax over all comes to.
    divisor = total if SOFTMAX_FIRST and not RENORMALIZE else tl.sum(parts, 0)
    to = token * TOP_K + places
    tl.store(ids + to, found, mask=places < TOP_K)
    tl.store(weights + to, parts / divisor, mask=places < TOP_K)


def route(
    scores: Tensor, top_k: int, *, softmax_first: bool = True, renormalize: bool = True
) -> tuple[Tensor, Tensor]:
    """The experts of each token: weights float32 and ids int32, [T, top_k], best first.

    scores [T, E], E at most 1024. Weights are a softmax over all experts, renormalised over the
    chosen or not, or over the chosen alone (`softmax_first=False`).
    """
    tokens, experts = scores.shape
    if not 1 <= top_k <= experts <= MOST_EXPERTS:
        raise ValueError(f"the best {top_k} of {describe(scores)}: at most {MOST_EXPERTS} experts")
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=scores.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=scores.device)
    launch(
        route_kernel, (tokens,), weights, ids, scores, scores.stride(0), EXPERTS=experts,
        PADDED=triton.next_power_of_2(experts), TOP_K=top_k,
        PLACES=triton.next_power_of_2(top_k), SOFTMAX_FIRST=softmax_first,
        RENORMALIZE=renormalize, num_warps=1,
    )  # fmt: skip
    return weights, ids
