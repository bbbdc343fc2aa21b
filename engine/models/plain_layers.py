"""Layers that run operation by operation, made from their weights."""

from __future__ import annotations

from dataclasses import replace

from engine.models.adapters import AdaptedExperts, AdaptedLinear, CurrentStep
from engine.models.attention import Attention, Clamped, FullWidthNorm, HeadLayerNorm
from engine.models.decoder_layers import Layer, ParallelLayer, ResidualExpertsLayer, SequentialLayer
from engine.models.latent_attention import LatentAttention
from engine.models.layer_weights import (
    AttentionWeights,
    LatentWeights,
    LayerWeights,
    MeetingWeights,
    MlpWeights,
    StateWeights,
)
from engine.models.norms import NoNorm, Norm, Scaled, Transform, chain, mlp_of, norm_of
from engine.models.spec import DecoderSpec
from engine.models.states import StateMixer
from kernels import KernelSet, LinearLayer
from kernels.interface import HeadNormWeights, NormWeights


def adapted(ops: KernelSet, layer: LayerWeights, index: int, step: CurrentStep) -> LayerWeights:
    """The layer whose linear layers also do what adapters say."""

    def one(linear: LinearLayer, slot: str) -> LinearLayer:
        return AdaptedLinear(ops, linear, (index, slot), step)

    def mlp(weights: MlpWeights | None, prefix: str) -> MlpWeights | None:
        if weights is None:
            return None
        up, down = one(weights.up, f"{prefix}up"), one(weights.down, f"{prefix}down")
        return replace(weights, up=up, down=down)

    def meeting(weights: MeetingWeights) -> MeetingWeights:
        if isinstance(weights, AttentionWeights):
            return replace(weights, qkv=one(weights.qkv, "qkv"), o=one(weights.o, "o"))
        if isinstance(weights, LatentWeights):
            queries = None if weights.queries is None else one(weights.queries, "latent_q")
            inputs, o = one(weights.inputs, "latent_in"), one(weights.o, "o")
            return replace(weights, inputs=inputs, queries=queries, o=o)
        rates = None if weights.rates is None else one(weights.rates, "state_rates")
        inputs, output = one(weights.inputs, "state_in"), one(weights.output, "state_out")
        return replace(weights, inputs=inputs, rates=rates, output=output)

    experts = layer.experts
    return replace(
        layer,
        experts=None if experts is None else AdaptedExperts(experts, index, step),
        attention=meeting(layer.attention),
        mlp=mlp(layer.mlp, ""),
        residual_mlp=mlp(layer.residual_mlp, "residual_"),
    )


def plain_layer(
    spec: DecoderSpec, ops: KernelSet, layer: LayerWeights, following: NormWeights
) -> Layer:
    """One layer; `following` is the norm of the next one, or the last."""

    def norm(weights: NormWeights) -> Norm:
        return norm_of(ops, weights, spec.hidden_size, spec.norm_eps)

    def finished(first: Transform, out_norm: NormWeights) -> Transform:
        """With the norm and the factor that come before the residual."""
        after: list[Transform] = [] if out_norm.kind == "none" else [norm(out_norm)]
        if spec.residual_scale != 1.0:
            after.append(Scaled(spec.residual_scale))
        return chain(first, *after)

    out_norm, attention = layer.attention_out_norm, layer.attention
    meeting: Attention | LatentAttention | StateMixer
    if isinstance(attention, StateWeights):
        output = finished(attention.output, out_norm)
        meeting = StateMixer(ops=ops, weights=attention, output=output, eps=spec.norm_eps)
    elif isinstance(attention, LatentWeights):
        meeting = LatentAttention(
            ops=ops,
            weights=attention,
            output=finished(attention.o, out_norm),
            heads=spec.num_heads,
            scale=spec.attention_scale,
            neox=spec.rope_neox,
        )
    else:
        meeting = _attention(spec, ops, attention)
        meeting.output = finished(attention.o, out_norm)
    block = layer.experts or (mlp_of(ops, layer.mlp) if layer.mlp is not None else None)
    if block is None:
        raise ValueError("a layer has either an MLP or experts")
    mlp, after = finished(block, layer.mlp_out_norm), norm(following)
    mlp_norm = None if layer.mlp_norm is None else norm(layer.mlp_norm)
    if layer.residual_mlp is not None:
        beside = mlp_of(ops, layer.residual_mlp)
        before = mlp_norm or NoNorm()
        return ResidualExpertsLayer(meeting, norm(layer.residual_norm), beside, before, mlp, after)
    if layer.wiring == "parallel":
        return ParallelLayer(meeting, mlp_norm, mlp, after)
    return SequentialLayer(meeting, mlp_norm or NoNorm(), mlp, after)


def _attention(spec: DecoderSpec, ops: KernelSet, weights: AttentionWeights) -> Attention:
    return Attention(
        ops=ops,
        project=chain(weights.qkv, *_after_qkv(spec, ops, weights)),
        output=weights.o,
        sizes=(
            spec.q_size * (2 if spec.gated_attention else 1),
            spec.kv_size,
            spec.kv_size,
        ),
        gated=spec.gated_attention,
        head_dim=spec.head_dim,
        scale=spec.attention_scale or spec.head_dim**-0.5,
        eps=spec.norm_eps,
        cos_sin=weights.cos_sin,
        neox=spec.rope_neox,
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
        window=weights.window,
        sparse=weights.sparse,
        soft_cap=spec.attention_soft_cap,
        alibi_slopes=weights.alibi,
        sinks=weights.sinks,
    )


def _after_qkv(spec: DecoderSpec, ops: KernelSet, weights: AttentionWeights) -> list[Transform]:
    """What happens to queries, keys and values before they are rotated."""
    found: list[Transform] = []
    if weights.q_full_norm is not None and weights.k_full_norm is not None:
        found.append(FullWidthNorm(ops, weights.q_full_norm, weights.k_full_norm, spec.norm_eps))
    if weights.q_head_norm is not None:
        found.append(_head_norm(spec, weights.q_head_norm, 0, spec.num_heads))
    if weights.k_head_norm is not None:
        found.append(_head_norm(spec, weights.k_head_norm, spec.q_size, spec.num_kv_heads))
    if spec.clip_qkv:
        found.append(Clamped(spec.clip_qkv))
    return found


def _head_norm(spec: DecoderSpec, norm: HeadNormWeights, start: int, heads: int) -> HeadLayerNorm:
    return HeadLayerNorm(start, heads, spec.head_dim, norm.weight, norm.bias, spec.norm_eps)
