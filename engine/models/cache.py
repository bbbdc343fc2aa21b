"""The keys and values of one layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import KernelSet


class LayerCache(NamedTuple):
    """A layer's share of the KV pool; layers of different groups may have the same one.

    Attributes:
        keys, values: [num_blocks, num_kv_heads, block_size, head_dim].
        key_scales, value_scales: float32 [num_blocks, num_kv_heads, block_size] of int8 caches,
            where each token's head is rounded with a scale of its own; else None.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


def new_cache(ops: KernelSet, shape: tuple[int, int, int, int], dtype: torch.dtype) -> LayerCache:
    """An empty cache; its pages are mapped when they are first written."""
    keys, values = ops.new_kv_cache(shape, dtype), ops.new_kv_cache(shape, dtype)
    if dtype != torch.int8:
        return LayerCache(keys, values)
    scales = [ops.new_kv_cache(shape[:3], torch.float32) for _ in range(2)]
    return LayerCache(keys, values, *scales)
