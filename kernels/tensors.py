"""Checks of tensors before their addresses are passed to a kernel.

The checks are few and cheap; they prevent access outside of a tensor. All raise ValueError.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device without waiting for it.

    The copy is made from pinned memory, which torch keeps until it is complete.
    """
    if device == tensor.device:
        return tensor
    pinned = tensor.pin_memory() if torch.accelerator.is_available() else tensor
    return pinned.to(device, non_blocking=True)


def describe(x: Tensor) -> str:
    """Return the shape and dtype of `x` for a message."""
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def norm_width(x: Tensor, weight: Tensor) -> int:
    width = x.shape[-1]
    if weight.shape != (width,) or not weight.is_contiguous():
        raise ValueError(f"weight {describe(weight)} doesn't fit x {describe(x)}")
    return width


def token_stride(x: Tensor) -> int:
    """Return the elements between tokens of x [T, heads, D]; a token must be contiguous."""
    token, head, value = x.stride()
    if value != 1 or (head != x.shape[2] and x.shape[1] > 1):
        raise ValueError(f"the heads of a token must lie side by side, strides are {x.stride()}")
    return token


def check_caches(key_cache: Tensor, value_cache: Tensor, size: int) -> torch.Size:
    shape = key_cache.shape
    if value_cache.shape != shape or len(shape) != 4 or shape[3] != size:
        raise ValueError(
            f"caches {describe(key_cache)}, {describe(value_cache)} don't fit heads of {size}"
        )
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("the KV caches must be contiguous")
    if key_cache.dtype != value_cache.dtype:
        raise ValueError("the key and the value cache differ in dtype")
    return shape


def check_vector(name: str, x: Tensor, length: int, dtype: torch.dtype) -> None:
    if x.shape != (length,) or x.dtype != dtype or not x.is_contiguous():
        raise ValueError(
            f"{name} {describe(x)} must be [{length}] {str(dtype).removeprefix('torch.')}"
        )


def check_logits(logits: Tensor) -> tuple[int, int]:
    """Check float32 logits [R, vocab], and return their rows and vocabulary size."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits {describe(logits)} must be contiguous float32 [rows, vocab]")
    rows, vocab = logits.shape
    if not 0 < vocab < 1 << 31:
        raise ValueError(f"a vocabulary of {vocab} tokens can't be sampled from")
    return rows, vocab


def check_rotary(cos_sin: Tensor | None, size: int) -> tuple[int, int]:
    """Check a rotary table, and return its number of positions and of rotated values."""
    if cos_sin is None:
        return 0, 0
    max_position, rotary = cos_sin.shape
    if cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous() or rotary % 2 or rotary > size:
        raise ValueError(
            f"cos_sin {describe(cos_sin)} must be float32, even and at most {size} wide"
        )
    return max_position, rotary
