"""All layers in one call, which saves the overhead of Python: a dozen calls per layer.

Families with unsupported layers, and kernels without such a call, run layer by layer, and the
reason is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.models.decoder_spec import DecoderSpec
from engine.models.forward_context import LayerCache
from engine.models.layers.mamba import LIGHTNING_NORM_EPS, LayerStateCache
from engine.models.layers.weights import (
    LatentWeights,
    LayerWeights,
    SharedBlockWeights,
    StateWeights,
    TokenMixerWeights,
)
from engine.models.lora import LowRankLinear
from kernels import KernelSet
from kernels.compiled_decoder import LatentLayer, SharedBlock, StateLayer
from kernels.interface import CompiledDecoder, NormWeights
from kernels.layers import ACTIVATIONS, LinearLayer
from kernels.lora import PackedLora

log = logging.getLogger(__name__)


def compile_decoder(
    spec: DecoderSpec,
    ops: KernelSet,
    layers: Sequence[LayerWeights],
    final_norm: NormWeights,
    caches: Sequence[LayerCache],
    group_of: Sequence[int],
    states: Mapping[int, LayerStateCache],
) -> CompiledDecoder | None:
    """Return all layers and the final norm in one call, or None after logging the reason.

    Args:
        caches: KV caches of the layers with attention.
        group_of: their KV cache groups.
        states: states by index of their layer.
    """
    reason, compiled = _obstacle(spec, layers), None
    if not reason:
        attending = dict(
            zip(spec.attention_layers, zip(caches, group_of, strict=True), strict=True)
        )
        by_layer = [attending.get(index, (None, 0)) for index in range(spec.num_layers)]
        try:
            compiled = ops.compile_decoder(
                spec,
                layers,
                [cache and cache[:4] for cache, _ in by_layer],
                [group for _, group in by_layer],
                final_norm,
                [_state_layer(spec, layer, states.get(i)) for i, layer in enumerate(layers)],
                [_latent_layer(layer.attention) for layer in layers],
                [_shared_block(layer.shared) for layer in layers],
                caches[0].ranks if caches else None,
            )
            reason = f"{ops.name} kernels have no other way"
        except ValueError as error:
            reason = str(error)
    if compiled is None:
        log.info("%s runs layer by layer: %s", spec.architecture, reason)
    return compiled


def _state_layer(
    spec: DecoderSpec, layer: LayerWeights, cache: LayerStateCache | None
) -> StateLayer | None:
    weights = layer.state if layer.state is not None else layer.attention
    if spec.states is None or cache is None or not isinstance(weights, StateWeights):
        return None
    return StateLayer(
        kind=spec.states.kind,
        inputs=weights.inputs,
        input_scales=weights.input_scales,
        selection=weights.selection,
        selection_norms=weights.selection_norms,
        rates=weights.rates,
        gates=weights.gates,
        lru=weights.lru,
        conv=weights.conv,
        conv_bias=weights.conv_bias,
        scan=weights.scan,
        norm=weights.norm,
        eps=LIGHTNING_NORM_EPS if spec.states.kind == "lightning" else spec.norm_eps,
        norm_before_gate=spec.states.norm_before_gate,
        output=weights.output,
        output_scale=spec.states.output_scale,
        key_heads=spec.states.num_key_heads,
        conv_states=cache.conv,
        scan_states=cache.scan,
        scan_scales=cache.scales,
    )


def _latent_layer(weights: TokenMixerWeights | None) -> LatentLayer | None:
    if not isinstance(weights, LatentWeights):
        return None
    return LatentLayer(
        inputs=weights.inputs,
        queries=weights.queries,
        query_norm=weights.query_norm,
        latent_norm=weights.latent_norm,
        into=weights.into,
        out_of=weights.out_of,
        output=weights.o,
        cos_sin=weights.cos_sin,
        rotary=weights.latents.qk_rope_head_dim,
        eps=weights.latents.norm_eps,
    )


def _shared_block(weights: SharedBlockWeights | None) -> SharedBlock | None:
    if weights is None:
        return None
    qkv, qkv_added = _parts(weights.attention.qkv)
    up, up_added = _parts(weights.mlp.up)
    return SharedBlock(
        attention_norm=weights.attention_norm,
        attention=replace(weights.attention, qkv=qkv),
        mlp_norm=weights.mlp_norm,
        mlp=replace(weights.mlp, up=up),
        output=weights.output,
        mixer_norm=weights.mixer_norm,
        qkv_added=qkv_added,
        up_added=up_added,
    )


def _parts(linear: LinearLayer) -> tuple[LinearLayer, PackedLora | None]:
    if isinstance(linear, LowRankLinear):
        return linear.layer, linear.added
    return linear, None


def _obstacle(spec: DecoderSpec, layers: Sequence[LayerWeights]) -> str:
    """Return what the compiled decoder doesn't support; "" if it supports everything."""
    if spec.activation not in ACTIVATIONS:
        return f"it has the activation {spec.activation}"
    if spec.altup is not None:
        return "its tokens have several hidden states"
    if spec.kv_sources or spec.value_norm:
        return "its layers share keys and values, or norm values"
    exact = spec.norm == "rms" and (spec.gated or spec.activation in ("relu", "relu2"))
    if spec.states is not None and not exact:
        return "some of its layers carry a state, and have torch's activations"
    if spec.states is None and (spec.attends or spec.has_mlp):
        return "some of its layers have attention or an MLP alone"
    if spec.cross is not None:
        return "it attends to an encoder's states"
    if spec.latents is not None and spec.latents.index is not None:
        return "it attends to chosen latents"
    if any(layer.residual_mlp is not None for layer in layers) or (
        spec.wiring == "parallel" and spec.moe is not None
    ):
        return "it has experts beside attention"
    norms = [layer.mlp_norm for layer in layers]
    if spec.wiring == "parallel" and any(norm and norm.kind == "none" for norm in norms):
        return "its MLP takes the residual as it is, beside attention"
    return ""
