"""The native decoder: one implementation of the mainstream families, described by `DecoderSpec`.

Weights are fused at load (q, k and v; gate and up), one layer at a time, so that never more than a
layer is held twice. Activations are float32 on a CPU whatever the weights' dtype is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.layers.rotary import cos_sin_table
from engine.models.context import AttentionContext
from engine.models.spec import DecoderSpec
from kernels import KernelSet, LinearLayer


class Weights(Protocol):
    """Where tensors come from: a checkpoint or a source of random ones."""

    def __contains__(self, name: str) -> bool: ...

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The named tensor, which must have this shape."""


@dataclass(slots=True)
class DecoderLayer:
    """One layer's weights. Norm weights are float32 [hidden] (or [head_dim])."""

    input_norm: Tensor
    qkv: LinearLayer
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: LinearLayer
    post_norm: Tensor
    gate_up: LinearLayer
    down: LinearLayer
    window: int


class NativeDecoder:
    """Llama-shaped decoder over a paged KV cache.

    Args:
        spec: the architecture.
        ops: kernels of the device.
        weight_dtype: in which linear weights and the embedding are kept.
        max_model_len: length of the rotary table.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        ops: KernelSet,
        weight_dtype: torch.dtype,
        max_model_len: int,
    ) -> None:
        self.spec = spec
        self.ops = ops
        self.weight_dtype = weight_dtype
        self.scale = spec.attention_scale or spec.head_dim**-0.5
        self.cos_sin = cos_sin_table(spec.rope, max_model_len)
        self.layers: list[DecoderLayer] = []
        self.kv_caches: list[tuple[Tensor, Tensor]] = []

    # -- weights ------------------------------------------------------------------------------

    def load(self, weights: Weights, progress: Callable[[int, int], None]) -> None:
        """Read all weights; `progress(done, total)` is called after each layer."""
        spec, prefix = self.spec, self.spec.prefix
        total = spec.num_layers + 1
        table = (spec.vocab_size, spec.hidden_size)
        embedding = weights.get(f"{prefix}embed_tokens.weight", table)
        self.embedding = embedding.to(self.weight_dtype).clone()
        self.final_norm = self._norm(weights, f"{prefix}norm.weight", spec.hidden_size)
        head = self.embedding if spec.tie_embeddings else weights.get("lm_head.weight", table)
        self.lm_head = self._linear(head, None)
        progress(1, total)
        for index in range(spec.num_layers):
            self.layers.append(self._load_layer(weights, index))
            progress(index + 2, total)

    def _load_layer(self, weights: Weights, index: int) -> DecoderLayer:
        spec, at = self.spec, f"{self.spec.prefix}layers.{index}."
        hidden, q, kv, inner = spec.hidden_size, spec.q_size, spec.kv_size, spec.intermediate_size
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        qkv = [(f"{attention}{name}_proj", size) for name, size in (("q", q), ("k", kv), ("v", kv))]
        gate_up = [(f"{mlp}{name}_proj", inner) for name in ("gate", "up")]
        return DecoderLayer(
            input_norm=self._norm(weights, f"{at}input_layernorm.weight", hidden),
            qkv=self._fused(weights, qkv, hidden, spec.qkv_bias),
            q_norm=self._head_norm(weights, f"{attention}q_norm.weight"),
            k_norm=self._head_norm(weights, f"{attention}k_norm.weight"),
            o=self._fused(weights, [(f"{attention}o_proj", hidden)], q, spec.o_bias),
            post_norm=self._norm(weights, f"{at}post_attention_layernorm.weight", hidden),
            gate_up=self._fused(weights, gate_up, hidden, spec.mlp_bias),
            down=self._fused(weights, [(f"{mlp}down_proj", hidden)], inner, spec.mlp_bias),
            window=spec.windows[index],
        )

    def _fused(
        self, weights: Weights, parts: list[tuple[str, int]], columns: int, bias: bool
    ) -> LinearLayer:
        """One linear layer from parts stacked over their rows."""
        matrices = [weights.get(f"{name}.weight", (rows, columns)) for name, rows in parts]
        biases = [weights.get(f"{name}.bias", (rows,)) for name, rows in parts] if bias else []
        return self._linear(torch.cat(matrices), torch.cat(biases).float() if biases else None)

    def _linear(self, weight: Tensor, bias: Tensor | None) -> LinearLayer:
        return self.ops.PackedLinear(weight.to(self.weight_dtype), bias)

    def _norm(self, weights: Weights, name: str, size: int) -> Tensor:
        return weights.get(name, (size,)).float().clone()

    def _head_norm(self, weights: Weights, name: str) -> Tensor | None:
        return self._norm(weights, name, self.spec.head_dim) if self.spec.qk_norm else None

    @property
    def decode_bytes(self) -> int:
        """Bytes of weights that a decode step of one sequence reads."""
        linears = [self.lm_head]
        for layer in self.layers:
            linears += [layer.qkv, layer.o, layer.gate_up, layer.down]
        return sum(linear.nbytes for linear in linears)

    # -- KV cache -----------------------------------------------------------------------------

    def allocate_kv(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        """Make each layer's caches: [num_blocks, num_kv_heads, block_size, head_dim] each."""
        shape = (num_blocks, self.spec.num_kv_heads, block_size, self.spec.head_dim)
        self.kv_caches = [
            (_lazy_zeros(shape, dtype), _lazy_zeros(shape, dtype)) for _ in self.layers
        ]

    # -- forward ------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states after the final norm.

        Args:
            token_ids: int64 [num_tokens].
            context: the step's batch.

        Returns:
            [num_rows, hidden] for `context.logits_rows` (all tokens when None).
        """
        ops, eps = self.ops, self.spec.norm_eps
        residual = self.embedding[token_ids].float()
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x = layer.o(self._attend(layer, self.kv_caches[index], x, context))
            if index == last and context.logits_rows is not None:
                # From here on tokens don't meet: only those whose logits are wanted go on.
                x, residual = x[context.logits_rows], residual[context.logits_rows]
            x = ops.fused_add_rms_norm(x, residual, layer.post_norm, eps)
            x = layer.down(ops.silu_and_mul(layer.gate_up(x)))
            norm = self.final_norm if index == last else self.layers[index + 1].input_norm
            x = ops.fused_add_rms_norm(x, residual, norm, eps)
        return x

    def _attend(
        self,
        layer: DecoderLayer,
        caches: tuple[Tensor, Tensor],
        x: Tensor,
        context: AttentionContext,
    ) -> Tensor:
        """Attention of one layer: [num_tokens, q_size]. First writes the step's keys and values."""
        spec, (key_cache, value_cache) = self.spec, caches
        q, k, v = layer.qkv(x).split((spec.q_size, spec.kv_size, spec.kv_size), dim=-1)
        q = q.unflatten(-1, (spec.num_heads, spec.head_dim))
        k = k.unflatten(-1, (spec.num_kv_heads, spec.head_dim))
        v = v.unflatten(-1, (spec.num_kv_heads, spec.head_dim))
        self.ops.rope_and_cache(
            q,
            k,
            v,
            context.positions,
            self.cos_sin,
            key_cache,
            value_cache,
            context.slot_mapping,
            q_norm_weight=layer.q_norm,
            k_norm_weight=layer.k_norm,
            eps=spec.norm_eps,
        )
        out = self.ops.paged_attention(
            q,
            key_cache,
            value_cache,
            context.block_tables,
            context.seq_lens,
            context.query_start_loc,
            self.scale,
            sliding_window=layer.window,
        )
        return out.flatten(1)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [num_rows, vocab_size] from [num_rows, hidden]."""
        return self.lm_head(hidden)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages the system maps when they're first written: an idle pool costs nothing."""
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
