"""All layers in one call: the native decoder's layers as the kernels' `CompiledDecoder`.

What is gained is Python's share of a step, a dozen calls a layer. Families that do something else
in a layer, and kernels that have no such call, run layer by layer; the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from engine.models.attention import Attention, Clamped, FullWidthNorm, HeadLayerNorm
from engine.models.blocks import Layer, ParallelLayer, ResidualExpertsLayer
from engine.models.cache import LayerCache
from engine.models.compiled_experts import ACTIVATIONS
from engine.models.norms import LayerNorm, NoNorm, Norm, RMSNorm, Scaled, Step, steps_of
from engine.models.spec import DecoderSpec
from kernels import KernelSet, LinearLayer
from kernels.interface import (
    NO_NORM,
    CompiledDecoder,
    CompiledExperts,
    DecoderLayerWeights,
    DecoderShape,
    HeadNormWeights,
    NormWeights,
)

log = logging.getLogger(__name__)


class NotCompiled(Exception):
    """Why a decoder can't run in one call."""


def compile_decoder(
    spec: DecoderSpec,
    ops: KernelSet,
    first_norm: Norm,
    layers: Sequence[Layer],
    caches: Sequence[LayerCache],
    group_of: Sequence[int],
) -> CompiledDecoder | None:
    """The layers from the first norm to the last in one call; None, and a line in the log: no.

    Args:
        first_norm: before the first layer.
        caches: each layer's.
        group_of: each layer's KV cache group.
    """
    try:
        _check(spec)
        table, norm = [], _norm(first_norm)
        for layer, cache, group in zip(layers, caches, group_of, strict=True):
            table.append(_weights(layer, norm, cache, group))
            norm = _norm(layer.next_norm)
        compiled = ops.compile_decoder(_shape(spec), table, norm)
    except (NotCompiled, ValueError) as error:
        log.info("%s runs layer by layer: %s", spec.architecture, error)
        return None
    if compiled is None:
        log.info(
            "%s runs layer by layer: %s kernels have no other way", spec.architecture, ops.name
        )
    return compiled


def _check(spec: DecoderSpec) -> None:
    """Raise `NotCompiled` for what the compiled decoder doesn't do."""
    if spec.activation not in ACTIVATIONS:
        raise NotCompiled(f"it has the activation {spec.activation}")
    if spec.wiring == "parallel" and spec.moe is not None:
        raise NotCompiled("it has experts beside attention")


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
    )


def _weights(
    layer: Layer, input_norm: NormWeights, cache: LayerCache, group: int
) -> DecoderLayerWeights:
    if isinstance(layer, ResidualExpertsLayer):
        raise NotCompiled("it has experts beside attention")
    if isinstance(layer, ParallelLayer) and isinstance(layer.mlp_norm, NoNorm):
        raise NotCompiled("its MLP takes the residual as it is, beside attention")
    attention: Attention = layer.attention
    qkv, *prepared = steps_of(attention.project)
    o, *attention_norm = steps_of(attention.output)
    return DecoderLayerWeights(
        input_norm=input_norm,
        qkv=_linear(qkv),
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        **_prepared(prepared),
        cos_sin=attention.cos_sin,
        key_cache=cache.keys,
        value_cache=cache.values,
        key_scales=cache.key_scales,
        value_scales=cache.value_scales,
        sliding_window=attention.window,
        alibi=attention.alibi_slopes,
        sinks=attention.sinks,
        o=_linear(o),
        attention_out_norm=_out_norm(attention_norm),
        mlp_norm=NO_NORM if layer.mlp_norm is None else _norm(layer.mlp_norm),
        **_feed_forward(layer.mlp),
        group=group,
    )


def _feed_forward(step: Step) -> dict[str, Any]:
    """The MLP or the experts, and the norm after them."""
    first, *rest = steps_of(step)
    if isinstance(first, CompiledExperts):
        return {"experts": first, "mlp_out_norm": _out_norm(rest)}
    if len(rest) < 2:
        raise NotCompiled("its experts run one by one")
    _, down, *norm = rest
    return {"gate_up": _linear(first), "down": _linear(down), "mlp_out_norm": _out_norm(norm)}


def _prepared(steps: Sequence[Step]) -> dict[str, Any]:
    """What is done with queries, keys and values before they are rotated."""
    found: dict[str, Any] = {}
    for step in steps:
        if isinstance(step, FullWidthNorm):
            found |= {"q_full_norm": step.q_weight, "k_full_norm": step.k_weight}
        elif isinstance(step, HeadLayerNorm):
            name = "k_head_norm" if step.start else "q_head_norm"
            found[name] = HeadNormWeights(step.weight.contiguous(), step.bias)
        elif not isinstance(step, Clamped):  # whose limit is the shape's
            raise NotCompiled("it does more with queries, keys and values")
    return found


def _linear(step: Step) -> LinearLayer:
    if not isinstance(step, LinearLayer):
        raise NotCompiled("a layer isn't made of packed weights alone")
    return step


def _norm(norm: Norm | Step) -> NormWeights:
    if isinstance(norm, RMSNorm):
        return NormWeights("rms", norm.weight)
    if isinstance(norm, LayerNorm):
        return NormWeights("layer", norm.weight, norm.bias)
    if isinstance(norm, NoNorm):
        return NO_NORM
    raise NotCompiled(f"it has a norm of its own, {type(norm).__name__}")


def _out_norm(steps: Sequence[Step]) -> NormWeights:
    """The norm of what a block adds to the residual; a factor after it is the shape's."""
    norms = [step for step in steps if not isinstance(step, Scaled)]
    if len(norms) > 1:
        raise NotCompiled("it does more with what a block gives")
    return _norm(norms[0]) if norms else NO_NORM
