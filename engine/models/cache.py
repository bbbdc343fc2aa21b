"""The keys and values of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.contract.errors import ConfigError
from kernels import KernelSet


class LayerCache(NamedTuple):
    """A layer's share of the KV pool; layers of different groups may have the same one.

    Attributes:
        keys, values: [num_blocks, num_kv_heads, block_size, head_dim]; latents are both at once.
        key_scales, value_scales: float32 [num_blocks, num_kv_heads, block_size] of int8 caches,
            where each token's head is rounded with a scale of its own; of fp8 caches float32 [1] or
            [num_kv_heads], the layer's own, or None for 1; else None.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class KVScales:
    """One layer's scales of fp8 caches, float32 [1] or [num_kv_heads] each."""

    keys: Tensor
    values: Tensor

    def put_on(self, cache: LayerCache) -> LayerCache:
        """The cache with these scales."""
        device, heads = cache.keys.device, cache.keys.shape[1]
        keys, values = self.keys.to(device), self.values.to(device)
        if len(keys) != len(values):
            keys, values = keys.expand(heads).contiguous(), values.expand(heads).contiguous()
        return cache._replace(key_scales=keys, value_scales=values)


def new_cache(
    ops: KernelSet, shape: tuple[int, int, int, int], dtype: torch.dtype, *, latents: bool = False
) -> LayerCache:
    """An empty cache; its pages are mapped when they are first written. `latents`: keys are values.

    Raises `ConfigError` where the system hasn't got so much memory.
    """

    def pair(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys = ops.new_kv_cache(shape, dtype)
        return keys, keys if latents else ops.new_kv_cache(shape, dtype)

    try:
        both = pair(*shape, dtype=dtype)
        if dtype != torch.int8:
            return LayerCache(*both)
        return LayerCache(*both, *pair(*shape[:3], dtype=torch.float32))
    except MemoryError as error:
        raise ConfigError(
            f"No room for a KV cache of {shape[0]} blocks of {shape[2]} tokens: {error}.",
            param="num_gpu_blocks_override",
        ) from error
