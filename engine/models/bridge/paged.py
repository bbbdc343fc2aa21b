"""Attention of a bridged model over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.models.bridge.interface import Call
from engine.models.context import AttentionContext
from kernels import KernelSet
from kernels.attention.args import AttentionArgs


@dataclass(slots=True)
class PagedLayer:
    """One attention call of a forward pass: what it keeps and what it sees.

    A module that is called twice (a block that layers share) makes two of these.

    Attributes:
        num_heads, num_kv_heads: of queries, of keys and values.
        head_dim: of queries and keys; value_dim: of values.
        window: tokens that a token sees, itself included; 0: all before it.
        group: its KV cache group.
        caches: keys and values, [num_blocks, num_kv_heads, block_size, size] each.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0
    group: int = 0
    caches: tuple[Tensor, Tensor] | None = None

    @property
    def size(self) -> int:
        """Of a head in the cache: the shorter of keys and values is padded with zeros."""
        return max(self.head_dim, self.value_dim)


class PagedRun:
    """A forward pass whose attention calls write to and read from the caches, in their order."""

    def __init__(self, layers: list[PagedLayer], context: AttentionContext, ops: KernelSet) -> None:
        self._layers, self._groups, self._ops = layers, context.groups, ops
        self._next = 0

    def attend(self, call: Call) -> Tensor:
        """See `Run`."""
        layer = self._layers[self._next]
        self._next += 1
        if layer.caches is None:
            raise RuntimeError("the KV cache isn't allocated")
        context, caches = self._groups[layer.group], layer.caches
        batch, heads, tokens, size = call.query.shape
        options = call.options
        ops = self._ops
        kept = _kept(caches[0], ops)
        parts = (call.query, call.key, call.value)
        q, k, v = (_by_token(part, layer.size).to(kept) for part in parts)
        ops.rope_and_cache(q, k, v, context.positions, None, *caches, context.slot_mapping)
        sinks = options.get("s_aux")
        out = ops.paged_attention(
            AttentionArgs(
                q,
                *caches,
                context.block_tables,
                context.seq_lens,
                context.query_start_loc,
                float(options.get("scaling") or size**-0.5),
                sliding_window=layer.window,
                soft_cap=float(options.get("softcap") or 0.0),
                sinks=None if sinks is None else sinks.float().contiguous(),
            )
        )
        return out.float().view(batch, tokens, heads, layer.size)[..., : layer.value_dim]

    def mask(self, **arguments: Any) -> Tensor:
        """Never asked for: `transformers` makes no masks for the name that steps run under."""
        raise RuntimeError("a mask was asked for while serving")

    def finish(self) -> None:
        """Raise RuntimeError unless each layer was called once."""
        if self._next != len(self._layers):
            raise RuntimeError(
                f"{self._next} attention calls in a forward pass instead of {len(self._layers)}"
            )


def _kept(cache: Tensor, ops: KernelSet) -> torch.dtype:
    """In which dtype attention is given its inputs: the activations' for a cache of this dtype."""
    return ops.activation_dtype(cache.dtype if cache.dtype.itemsize > 1 else torch.bfloat16)


def _by_token(x: Tensor, size: int) -> Tensor:
    """[batch, heads, tokens, n] as float32 [batch * tokens, heads, size], dense."""
    x = x.transpose(1, 2).flatten(0, 1).float()
    if x.shape[-1] < size:
        x = pad(x, (0, size - x.shape[-1]))
    return x.contiguous()
