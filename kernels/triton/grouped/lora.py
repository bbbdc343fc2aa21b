"""Low-rank adapters for a batch in which each row has its own: shrink, then expand.

Chen et al. 2023 ("Punica") and Sheng et al. 2023 ("S-LoRA"). Rows of one adapter meet its matrices
as one product, whatever order they come in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.triton.grouped.align import Groups, align
from kernels.triton.grouped.gemm import grouped_gemm
from kernels.triton.launch import target_of

LORA_TILE = 16


def lora_groups(adapters: Tensor, count: int) -> Groups:
    """Rows sorted by adapter, once a step: int32 [T] in [0, count), -1 for rows without one."""
    return align(adapters, count, LORA_TILE)


def lora_shrink(x: Tensor, a: Tensor, groups: Groups, scale: float = 1.0) -> Tensor:
    """float32 [T, r]: scale * x A^T, zeros for rows without an adapter.

    x [T, K]; a [L, r, K], adapters of lower rank padded with zeros. The result is small and K is
    long, so that K is shared out among programs.
    """
    target = target_of(x.device)
    programs = max(1, len(groups.group))
    depth = x.shape[1]
    splits = max(1, min(-(-target.processors // programs), depth // 512, 8))
    return grouped_gemm(x, a, groups, factor=scale, splits=splits, dtype=torch.float32)


def lora_expand(h: Tensor, b: Tensor, groups: Groups, out: Tensor, start: int = 0) -> None:
    """Add h B^T to the columns of `out` from `start` on.

    h float32 [T, r] from `lora_shrink`; b [L, N, r]; out [T, columns], any float dtype.
    """
    part = out[:, start : start + b.shape[1]]
    grouped_gemm(h.to(b.dtype), b, groups, out=part, add=True)
