"""Device functions of single logits: how they order, and what they weigh."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered_keys(x):
    """float32 -> int32 that orders as the floats do; -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def floats_of(keys):
    """The inverse of `ordered_keys`."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weigh(x, top, inverse):
    """exp((x - top) / temperature); `inverse` is log2(e) / temperature."""
    return tl.exp2((x - top) * inverse)
