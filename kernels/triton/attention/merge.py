"""Joining attention over two sets of keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import describe
from kernels.triton.launch import launch


@triton.jit
def merge_kernel(
    out,
    out_lse,
    first,
    first_lse,
    second,
    second_lse,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid (T * heads,)."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    weight_a = tl.load(first_lse + row)
    weight_b = tl.load(second_lse + row)
    best = tl.maximum(tl.maximum(weight_a, weight_b), -1.0e30)
    # An empty side may hold anything, NaN included: it's not read.
    read_a = dims < tl.where(weight_a > -1.0e30, HEAD_SIZE, 0)
    read_b = dims < tl.where(weight_b > -1.0e30, HEAD_SIZE, 0)
    a = tl.load(first + row * HEAD_SIZE + dims, mask=read_a, other=0.0)
    b = tl.load(second + row * HEAD_SIZE + dims, mask=read_b, other=0.0)
    weight_a = tl.exp2(weight_a - best)
    weight_b = tl.exp2(weight_b - best)
    total = weight_a + weight_b
    joined = (a.to(tl.float32) * weight_a + b.to(tl.float32) * weight_b) / tl.where(
        total > 0, total, 1.0
    )
    tl.store(out + row * HEAD_SIZE + dims, joined.to(out.dtype.element_ty), mask=dims < HEAD_SIZE)
    tl.store(
        out_lse + row, tl.where(total > 0, best + tl.log2(tl.maximum(total, 1e-38)), float("-inf"))
    )


def merge_attention_states(
    first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys.

    Args:
        first, second: [T, Hq, D], each normalised by itself, contiguous, same dtype.
        first_lse, second_lse: float32 [T, Hq], logarithms to base 2 of their softmaxes' sums, as
            `paged_attention` writes them; -inf for an empty set.

    Returns:
        The merged state and its float32 [T, Hq]. Ye et al. 2025 ("FlashInfer"), section 3.
    """
    if first.shape != second.shape or first.dtype != second.dtype:
        raise ValueError(f"states {describe(first)} and {describe(second)} differ")
    tokens, heads, size = first.shape
    for lse in (first_lse, second_lse):
        if lse.shape != (tokens, heads) or lse.dtype != torch.float32 or not lse.is_contiguous():
            raise ValueError(f"lse {describe(lse)} must be float32 {[tokens, heads]}")
    if not (first.is_contiguous() and second.is_contiguous()):
        raise ValueError("states must be contiguous")
    out, out_lse = torch.empty_like(first), torch.empty_like(first_lse)
    launch(
        merge_kernel, (tokens * heads,), out, out_lse, first, first_lse, second, second_lse,
        HEAD_SIZE=size, PADDED=triton.next_power_of_2(size), num_warps=1,
    )  # fmt: skip
    return out, out_lse
