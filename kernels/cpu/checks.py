"""What must hold of tensors before their addresses go to C++, beside `kernels.checks`."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import (
    check_caches,
    check_logits,
    check_rotary,
    check_vector,
    describe,
    norm_width,
    token_stride,
)
from kernels.cpu.library import DTYPES

__all__ = [
    "address",
    "check_caches",
    "check_logits",
    "check_norms",
    "check_rotary",
    "check_scales",
    "check_vector",
    "describe",
    "norm_width",
    "per_head",
    "token_stride",
]


def address(x: Tensor | None) -> int | None:
    """Where a tensor's values begin."""
    return None if x is None else x.data_ptr()


def check_scales(
    cache: Tensor, key_scales: Tensor | None, value_scales: Tensor | None
) -> tuple[int | None, int | None]:
    """The addresses of an int8 cache's scales; others have none."""
    if cache.dtype != torch.int8:
        return None, None
    for scales in (key_scales, value_scales):
        if scales is None or scales.shape != cache.shape[:3] or scales.dtype != torch.float32:
            raise ValueError(f"an int8 cache needs float32 scales {list(cache.shape[:3])}")
        if not scales.is_contiguous():
            raise ValueError("the scales of a cache must be contiguous")
    return key_scales.data_ptr(), value_scales.data_ptr()  # type: ignore[union-attr]


def check_norms(q_norm: Tensor | None, k_norm: Tensor | None, size: int) -> int:
    """The code of the norm weights' dtype."""
    given = [weight for weight in (q_norm, k_norm) if weight is not None]
    for weight in given:
        if weight.shape != (size,) or weight.dtype != given[0].dtype or not weight.is_contiguous():
            raise ValueError(f"norm weight {describe(weight)} doesn't fit heads of {size}")
    return DTYPES[given[0].dtype] if given else 0


def per_head(name: str, x: Tensor | None, heads: int) -> int | None:
    """The address of a float32 value for each query head."""
    if x is None:
        return None
    check_vector(name, x, heads, torch.float32)
    return x.data_ptr()


def check_dense(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless x has this shape and dtype, without gaps."""
    if x.shape != shape or x.dtype != dtype or not x.is_contiguous():
        wanted = f"{list(shape)} {str(dtype).removeprefix('torch.')}"
        raise ValueError(f"{name} {list(x.shape)} {x.dtype} must be contiguous {wanted}")
