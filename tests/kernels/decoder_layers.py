"""Layers and shapes of compiled decoders, whose fields tests change one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.attention_args import BlockSparse
from kernels.compiled_decoder import KVCache
from kernels.interface import (
    NO_NORM,
    ActivationSpec,
    AttentionWeights,
    CompiledDecoder,
    HeadNormWeights,
    KernelSet,
    LinearLayer,
    MixtureOfExperts,
    MlpWeights,
    NormWeights,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """See `kernels.compiled_decoder.DecoderShape`."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    attention_scale: float
    attention_soft_cap: float = 0.0
    rope_neox: bool = True
    activation: str = "silu"
    activation_limit: float = 0.0
    activation_alpha: float = 0.0
    gated: bool = True
    wiring: str = "sequential"
    residual_scale: float = 1.0
    clip_qkv: float = 0.0
    round_attention: bool = False
    attention_output_scale: float = 1.0
    mlp_gate_scale: float = 1.0
    attention_output_gate: bool = False
    normed_residual: tuple[float, ...] = ()
    mlp_output_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """See `kernels.compiled_decoder.DecoderLayer`; it has its cache and group, too."""

    input_norm: NormWeights
    qkv: LinearLayer
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    q_full_norm: Tensor | None = None
    k_full_norm: Tensor | None = None
    q_head_norm: HeadNormWeights | None = None
    k_head_norm: HeadNormWeights | None = None
    cos_sin: Tensor | None
    key_cache: Tensor
    value_cache: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    window: int = 0
    sparse: BlockSparse | None = None
    alibi: Tensor | None = None
    local_columns: Tensor | None = None
    distance_bias: Tensor | None = None
    sinks: Tensor | None = None
    o: LinearLayer
    attention_out_norm: NormWeights = NO_NORM
    mlp_norm: NormWeights
    gate_up: LinearLayer | None = None
    down: LinearLayer | None = None
    experts: MixtureOfExperts | None = None
    mlp_out_norm: NormWeights = NO_NORM
    group: int = 0

    @property
    def attention(self) -> AttentionWeights:
        names = [field.name for field in dataclasses.fields(AttentionWeights)]
        return AttentionWeights(**{name: getattr(self, name) for name in names})

    @property
    def mlp(self) -> MlpWeights | None:
        if self.gate_up is None or self.down is None:
            return None
        return MlpWeights(self.gate_up, self.down, ActivationSpec(), True)

    @property
    def cache(self) -> KVCache:
        return self.key_cache, self.value_cache, self.key_scales, self.value_scales


def compile_layers(
    kernels: KernelSet, shape: Shape, layers: Sequence[Layer], final_norm: NormWeights
) -> CompiledDecoder | None:
    caches, groups = [layer.cache for layer in layers], [layer.group for layer in layers]
    return kernels.compile_decoder(shape, layers, caches, groups, final_norm)
