"""A mixture of experts in two grouped products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.lora import MoeLoraMapping
from kernels.moe import MIN_WEIGHT_SUM
from kernels.tensors import check_vector, describe
from kernels.triton.elementwise import gate_and_mul
from kernels.triton.launch import INTERPRETED, launch
from kernels.triton.moe.grouped_gemm import Groups, align, grouped_gemm, tile_rows

MAX_EXPERTS = 1024


@triton.jit
def open_groups(
    remaining, expert, EXPERTS: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, PADDED_GROUPS: tl.constexpr,
):  # fmt: skip
    """Return the selection scores with -inf outside of the TOP_GROUPS best groups.

    A group's score is the sum of its GROUP_BEST largest; of equal groups the first is taken.
    """
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group = expert // SIZE
    groups = tl.arange(0, PADDED_GROUPS)
    sums = tl.full((PADDED_GROUPS,), float("-inf"), tl.float32)
    for number in tl.static_range(GROUPS):
        members = tl.where((group == number) & (expert < EXPERTS), remaining, float("-inf"))
        best = tl.max(members, 0)
        if GROUP_BEST == 2:
            index = tl.min(tl.where(members == best, expert, PADDED), 0)
            best += tl.max(tl.where(expert == index, float("-inf"), members), 0)
        sums = tl.where(groups == number, best, sums)
    opened = tl.zeros((PADDED,), tl.int1)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(sums, 0)
        index = tl.min(tl.where(sums == best, groups, PADDED_GROUPS), 0)
        opened = opened | (group == index)
        sums = tl.where(groups == index, float("-inf"), sums)
    return tl.where(opened, remaining, float("-inf"))


@triton.jit
def route_kernel(
    weights,
    ids,
    scores,
    bias,
    stride,
    scale,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_TOP_K: tl.constexpr,
    SOFTMAX_FIRST: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    MIN_WEIGHT_SUM: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
):
    """Choose the TOP_K experts with the largest scores, ties by ascending id. Grid (tokens,).

    With SIGMOID the sigmoid of a score is the expert's weight. The bias and the groups affect only
    the choice. Groups are ranked by probabilities or sigmoids, not by the scores themselves.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    score = tl.load(
        scores + token * stride + expert, mask=expert < EXPERTS, other=float("-inf")
    ).to(tl.float32)
    top = tl.max(score, 0)
    shares = tl.exp(score - top)
    total = tl.sum(shares, 0)
    # Whether a chosen expert's score is its weight, or the weight is exp(score).
    AS_IT_IS: tl.constexpr = SIGMOID or ((BIASED or GROUPS > 1) and SOFTMAX_FIRST)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-score))
    elif AS_IT_IS:
        score = shares / total
    remaining = score
    if BIASED:
        remaining += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)
    remaining = tl.where(expert < EXPERTS, remaining, float("-inf"))
    if GROUPS > 1:
        remaining = open_groups(
            remaining, expert, EXPERTS, PADDED, GROUPS, TOP_GROUPS, GROUP_BEST, PADDED_GROUPS
        )
    ranks = tl.arange(0, PADDED_TOP_K)
    chosen = tl.zeros((PADDED_TOP_K,), tl.int32)
    parts = tl.zeros((PADDED_TOP_K,), tl.float32)
    for rank in tl.static_range(TOP_K):
        best = tl.max(remaining, 0)
        index = tl.min(tl.where((remaining == best) & (expert < EXPERTS), expert, PADDED), 0)
        # With NaN scores none equals the maximum; the ids must still be valid.
        index = tl.minimum(index, EXPERTS - 1)
        chosen = tl.where(ranks == rank, index, chosen)
        if BIASED:
            best = tl.sum(tl.where(expert == index, score, 0.0), 0)
        if not AS_IT_IS:
            best = tl.exp(best - top)
        parts = tl.where(ranks == rank, best, parts)
        remaining = tl.where(expert == index, float("-inf"), remaining)
    # Renormalizing a softmax over all experts equals a softmax over the chosen ones.
    if AS_IT_IS:
        # All sigmoids may be 0.
        divisor = tl.sum(parts, 0) + MIN_WEIGHT_SUM if RENORMALIZE else 1.0
    else:
        divisor = total if SOFTMAX_FIRST and not RENORMALIZE else tl.sum(parts, 0)
    to = token * TOP_K + ranks
    tl.store(ids + to, chosen, mask=ranks < TOP_K)
    tl.store(weights + to, parts / divisor * scale, mask=ranks < TOP_K)


def route(
    scores: Tensor,
    top_k: int,
    *,
    softmax_first: bool = True,
    renormalize: bool = True,
    sigmoid: bool = False,
    choice_bias: Tensor | None = None,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token: weights float32 and ids int32, [T, top_k], best first.

    scores [T, E], E at most 1024. Weights are a softmax over all experts, renormalized over the
    chosen or not, or a softmax over the chosen alone (`softmax_first=False`); or `sigmoid`s,
    renormalized or not. `choice_bias`, float32 [E], is added only to choose experts; `scale`
    multiplies weights. With `groups` (consecutive groups of equal size), experts are chosen from
    the `top_groups` whose `group_best` largest scores (one or two) have the largest sum.
    """
    tokens, experts = scores.shape
    if not 1 <= top_k <= experts <= MAX_EXPERTS:
        raise ValueError(f"the best {top_k} of {describe(scores)}: at most {MAX_EXPERTS} experts")
    if groups < 1 or experts % groups or not 1 <= top_groups <= groups:
        raise ValueError(f"{top_groups} of {groups} groups of {experts} experts")
    if top_k > top_groups * (experts // groups) or not 1 <= group_best <= min(2, experts // groups):
        raise ValueError(f"{top_k} experts of {top_groups} groups by {group_best} of their scores")
    if choice_bias is not None:
        check_vector("choice_bias", choice_bias, experts, torch.float32)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=scores.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=scores.device)
    launch(
        route_kernel, (tokens,), weights, ids, scores, choice_bias, scores.stride(0), scale,
        EXPERTS=experts,
        PADDED=triton.next_power_of_2(experts), TOP_K=top_k,
        PADDED_TOP_K=triton.next_power_of_2(top_k), SOFTMAX_FIRST=softmax_first,
        RENORMALIZE=renormalize, SIGMOID=sigmoid, BIASED=choice_bias is not None,
        MIN_WEIGHT_SUM=MIN_WEIGHT_SUM, GROUPS=groups, TOP_GROUPS=top_groups, GROUP_BEST=group_best,
        PADDED_GROUPS=triton.next_power_of_2(groups),
        num_warps=1,
    )  # fmt: skip
    return weights, ids


def fused_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    tile: int | None = None,
    lora: MoeLoraMapping | None = None,
) -> Tensor:
    """Return each token's experts, weighted and summed, [T, H].

    x [T, H]; gate_up [E, 2 I, H]; down [E, H, I]; weights float32 and ids int32 [T, top_k] as
    returned by `route`, ids in [0, E); biases [E, 2 I] and [E, H]. `activation` is "silu", "gelu"
    or "gelu_tanh". A token's experts are summed in float32. `tile` fixes the rows per tile, so that
    the order of sums doesn't depend on T. `lora` adds the rows' adapters. Gale et al. 2022
    ("MegaBlocks").
    """
    tokens, hidden = x.shape
    experts, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.shape != (experts, 2 * inner, hidden) or down.shape != (experts, hidden, inner):
        raise ValueError(
            f"experts {describe(gate_up)} and {describe(down)} don't go with x {describe(x)}"
        )
    top_k = ids.shape[1]
    if ids.shape != (tokens, top_k) or weights.shape != ids.shape or not weights.is_contiguous():
        raise ValueError(f"weights {describe(weights)} and ids {describe(ids)} must be [T, top_k]")
    rows = tile_rows(tokens * top_k, experts) if tile is None or INTERPRETED else tile
    groups = align(ids.flatten(), experts, rows)
    # `route` gives every row an expert, so every row is written.
    both = grouped_gemm(x, gate_up, groups, shared=top_k, bias=gate_up_bias, fill=False)
    adding = None if lora is None else AddedToExperts(lora, groups, tokens, top_k)
    if adding is not None:
        adding.up(both, x)
    gated = gate_and_mul(both, activation)
    expert_outputs = grouped_gemm(
        gated, down, groups, bias=down_bias, scales=None if adding else weights.view(-1),
        dtype=torch.float32, fill=False,
    )  # fmt: skip
    if adding is not None:
        adding.down(expert_outputs, gated).mul_(weights.view(-1, 1))
    return add_up(expert_outputs.view(tokens, top_k, hidden), x.dtype, in_order=tile is not None)


class AddedToExperts:
    """The adapters' additions to a mixture's two products, before the experts are weighted."""

    def __init__(self, lora: MoeLoraMapping, groups: Groups, tokens: int, top_k: int) -> None:
        self._lora, self._groups, self._top_k = lora, groups, top_k
        self._owners = lora.slot_by_row(tokens)

    def up(self, y: Tensor, x: Tensor) -> Tensor:
        """Add to y [T * top_k, 2 I] in place, for x [T, H]."""
        target, slots = self._lora.target("up"), self._lora.slots
        slots.add_experts(target, y, x, self._owners, self._groups, self._top_k)
        return y

    def down(self, y: Tensor, x: Tensor) -> Tensor:
        """Add to y [T * top_k, H] in place, for x [T * top_k, I]."""
        owners = self._owners[:, None].expand(-1, self._top_k).reshape(-1)
        self._lora.slots.add_experts(self._lora.target("down"), y, x, owners, self._groups)
        return y


def add_up(parts: Tensor, dtype: torch.dtype, *, in_order: bool) -> Tensor:
    """Sum float32 [T, top_k, H] to [T, H]; `in_order` adds one after the other, whatever T is."""
    if not in_order:
        return parts.sum(1).to(dtype)
    total = parts[:, 0].clone()
    for rank in range(1, parts.shape[1]):
        total += parts[:, rank]
    return total.to(dtype)
