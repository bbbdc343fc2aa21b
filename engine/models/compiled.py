"""All layers in one call: the native decoder's layers as the kernels' `CompiledDecoder`.

What is gained is Python's share of a step, a dozen calls a layer. Families that do something else
in a layer, and kernels that have no such call, run layer by layer; the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from engine.models.attention import Attention
from engine.models.blocks import Layer
from engine.models.cache import LayerCache
from engine.models.norms import Norm, RMSNorm, Step, steps_of
from engine.models.spec import DecoderSpec
from kernels import KernelSet, LinearLayer
from kernels.interface import CompiledDecoder, DecoderLayerWeights, DecoderShape

log = logging.getLogger(__name__)

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


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
        table, norm = [], _rms(first_norm)
        for layer, cache, group in zip(layers, caches, group_of, strict=True):
            table.append(_weights(layer, norm, cache, group))
            norm = _rms(layer.next_norm)
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
    reasons = {
        "attention and MLP beside each other": spec.wiring != "sequential",
        "a mixture of experts": spec.moe is not None,
        "ALiBi": bool(spec.alibi_slopes),
        "clipped queries, keys and values": bool(spec.clip_qkv),
        f"norms of queries and keys by {spec.qk_norm}": spec.qk_norm not in ("", "rms_head"),
        "an MLP without a gate": not spec.gated,
        f"the activation {spec.activation}": spec.activation not in _ACTIVATIONS,
        "scaled residuals": spec.residual_scale != 1.0,
    }
    for reason, holds in reasons.items():
        if holds:
            raise NotCompiled(f"it has {reason}")


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
    )


def _weights(
    layer: Layer, input_norm: Tensor, cache: LayerCache, group: int
) -> DecoderLayerWeights:
    if layer.mlp_norm is None:
        raise NotCompiled("it has no norm before the MLP")
    attention: Attention = layer.attention
    (qkv,) = _linears(attention.project, 1)
    o, *attention_norm = steps_of(attention.output)
    gate_up, _, down, *mlp_norm = steps_of(layer.mlp)
    return DecoderLayerWeights(
        input_norm=input_norm,
        qkv=qkv,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        cos_sin=attention.cos_sin,
        key_cache=cache.keys,
        value_cache=cache.values,
        key_scales=cache.key_scales,
        value_scales=cache.value_scales,
        sliding_window=attention.window,
        sinks=attention.sinks,
        o=_linear(o),
        attention_out_norm=_out_norm(attention_norm),
        mlp_norm=_rms(layer.mlp_norm),
        gate_up=_linear(gate_up),
        down=_linear(down),
        mlp_out_norm=_out_norm(mlp_norm),
        group=group,
    )


def _linears(step: Step, count: int) -> list[LinearLayer]:
    steps = steps_of(step)
    if len(steps) != count:
        raise NotCompiled("it does more with queries, keys and values")
    return [_linear(one) for one in steps]


def _linear(step: Step) -> LinearLayer:
    if not isinstance(step, LinearLayer):
        raise NotCompiled("a layer isn't made of packed weights alone")
    return step


def _rms(norm: Norm | Step) -> Tensor:
    if not isinstance(norm, RMSNorm):
        raise NotCompiled("it has other norms than RMSNorm before each block")
    return norm.weight


def _out_norm(steps: Sequence[Step]) -> Tensor | None:
    """The norm of what a block adds to the residual."""
    if len(steps) > 1:
        raise NotCompiled("it does more with what a block gives")
    return _rms(steps[0]) if steps else None
