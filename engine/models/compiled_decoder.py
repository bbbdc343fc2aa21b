"""All layers in one call: a decoder's weights as the kernels' `CompiledDecoder`.

What is gained is Python's share of a step, a dozen calls a layer. Families that do something else
in a layer, and kernels that have no such call, run layer by layer; the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engine.models.decoder_spec import DecoderSpec
from engine.models.forward_context import LayerCache
from engine.models.layers.linear import AttentionWeights, LayerWeights
from kernels import KernelSet
from kernels.interface import (
    NO_NORM,
    CompiledDecoder,
    DecoderLayerWeights,
    DecoderShape,
    NormWeights,
)
from kernels.layers import ACTIVATIONS

log = logging.getLogger(__name__)


class CompileUnsupported(Exception):
    """Why a decoder can't run in one call."""


def compile_decoder(
    spec: DecoderSpec,
    ops: KernelSet,
    layers: Sequence[LayerWeights],
    final_norm: NormWeights,
    caches: Sequence[LayerCache],
    group_of: Sequence[int],
) -> CompiledDecoder | None:
    """The layers with the norm after them in one call; None, and a line in the log: no.

    Args:
        caches: each layer's.
        group_of: each layer's KV cache group.
    """
    try:
        _check(spec)
        table = [
            _weights(layer, cache, group)
            for layer, cache, group in zip(layers, caches, group_of, strict=True)
        ]
        compiled = ops.compile_decoder(_shape(spec), table, final_norm)
    except (CompileUnsupported, ValueError) as error:
        log.info("%s runs layer by layer: %s", spec.architecture, error)
        return None
    if compiled is None:
        log.info(
            "%s runs layer by layer: %s kernels have no other way", spec.architecture, ops.name
        )
    return compiled


def _check(spec: DecoderSpec) -> None:
    """Raise `CompileUnsupported` for what the compiled decoder doesn't do."""
    if spec.activation not in ACTIVATIONS:
        raise CompileUnsupported(f"it has the activation {spec.activation}")
    if spec.states is not None:
        raise CompileUnsupported("some of its layers carry a state")
    if spec.latents is not None:
        raise CompileUnsupported("it attends over latents")
    if spec.attention_output_gate:
        raise CompileUnsupported("its attention has gates")
    if spec.wiring == "parallel" and spec.moe is not None:
        raise CompileUnsupported("it has experts beside attention")


def _shape(spec: DecoderSpec) -> DecoderShape:
    return DecoderShape(
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        norm_eps=spec.norm_eps,
        scale=spec.attention_scale or spec.head_dim**-0.5,
        soft_cap=spec.attention_soft_cap,
        neox=spec.rope_neox,
        activation=spec.activation,
        activation_limit=spec.activation_limit,
        activation_alpha=spec.activation_alpha,
        gated=spec.gated,
        parallel=spec.wiring == "parallel",
        residual_scale=spec.residual_scale,
        clip_qkv=spec.clip_qkv,
        round_inputs=spec.round_attention,
    )


def _weights(layer: LayerWeights, cache: LayerCache, group: int) -> DecoderLayerWeights:
    if layer.residual_mlp is not None:
        raise CompileUnsupported("it has experts beside attention")
    mlp_norm, mlp, attention = layer.mlp_norm, layer.mlp, layer.attention
    if not isinstance(attention, AttentionWeights):
        raise CompileUnsupported("some of its layers have no keys and values")
    if layer.wiring == "parallel" and mlp_norm is not None and mlp_norm.kind == "none":
        raise CompileUnsupported("its MLP takes the residual as it is, beside attention")
    return DecoderLayerWeights(
        input_norm=layer.input_norm,
        qkv=attention.qkv,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        q_full_norm=attention.q_full_norm,
        k_full_norm=attention.k_full_norm,
        q_head_norm=attention.q_head_norm,
        k_head_norm=attention.k_head_norm,
        cos_sin=attention.cos_sin,
        key_cache=cache.keys,
        value_cache=cache.values,
        key_scales=cache.key_scales,
        value_scales=cache.value_scales,
        sliding_window=attention.window,
        sparse=attention.sparse,
        alibi=attention.alibi,
        sinks=attention.sinks,
        o=attention.o,
        attention_out_norm=layer.attention_out_norm,
        mlp_norm=NO_NORM if mlp_norm is None else mlp_norm,
        gate_up=None if mlp is None else mlp.up,
        down=None if mlp is None else mlp.down,
        experts=layer.experts,
        mlp_out_norm=layer.mlp_out_norm,
        group=group,
    )
