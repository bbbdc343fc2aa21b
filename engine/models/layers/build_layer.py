"""Builds layers from their weights, with adapters or without."""

from __future__ import annotations

from dataclasses import replace

from engine.models.decoder_spec import DecoderSpec
from engine.models.layers.altup import AltUp, AltUpLayer, SparseGate
from engine.models.layers.attention import (
    ClampQKV,
    CrossAttention,
    PerHeadLayerNorm,
    QKRMSNorm,
    SelfAttention,
    ValueRMSNorm,
)
from engine.models.layers.decoder_layer import (
    AttentionAndState,
    CrossLayer,
    Layer,
    MixerLayer,
    MlpLayer,
    NormedResidualLayer,
    ParallelLayer,
    ResidualExpertsLayer,
    SequentialLayer,
    SharedBlock,
    SharedBlockLayer,
    TokenMixer,
)
from engine.models.layers.mamba import StateMixer, make_mixer
from engine.models.layers.mla import MlaAttention, SparseIndex
from engine.models.layers.norm import (
    NoNorm,
    Norm,
    Scale,
    Transform,
    chain,
    make_norm,
    mlp_of,
    scaled,
)
from engine.models.layers.weights import (
    AltUpWeights,
    LatentWeights,
    LayerWeights,
    StateWeights,
    TokenMixerWeights,
)
from engine.models.lora import LatentLora, LoraContext, LoraHeads, LoraLinear, LoraMoe
from kernels import KernelSet, LinearLayer
from kernels.interface import NO_NORM, AttentionWeights, HeadNormWeights, MlpWeights, NormWeights
from kernels.layers import gated_activation


def adapted(ops: KernelSet, layer: LayerWeights, index: int, step: LoraContext) -> LayerWeights:
    """Return the layer with adapters applied to its linear layers."""

    def one(linear: LinearLayer, slot: str) -> LinearLayer:
        return LoraLinear(ops, linear, (index, slot), step)

    def mlp(weights: MlpWeights | None, prefix: str) -> MlpWeights | None:
        if weights is None:
            return None
        up, down = one(weights.up, f"{prefix}up"), one(weights.down, f"{prefix}down")
        return replace(weights, up=up, down=down)

    def state(weights: StateWeights) -> StateWeights:
        rates = None if weights.rates is None else one(weights.rates, "state_rates")
        gates = None if weights.gates is None else one(weights.gates, "state_gates")
        selection = weights.selection
        return replace(
            weights,
            inputs=one(weights.inputs, "state_in"),
            selection=None if selection is None else one(selection, "state_selection"),
            rates=rates,
            gates=gates,
            output=one(weights.output, "state_out"),
        )

    def mixer_weights(weights: TokenMixerWeights | None) -> TokenMixerWeights | None:
        if weights is None:
            return None
        if isinstance(weights, StateWeights):
            return state(weights)
        if isinstance(weights, AttentionWeights):
            return replace(weights, qkv=one(weights.qkv, "qkv"), o=one(weights.o, "o"))
        queries = None if weights.queries is None else one(weights.queries, "latent_q")
        inputs, o = one(weights.inputs, "latent_in"), one(weights.o, "o")
        target = index, "latent_heads"
        sparse = weights.index
        if sparse is not None:
            sparse = replace(
                sparse,
                queries=one(sparse.queries, "index_q"),
                keys=one(sparse.keys, "index_k"),
                weights=one(sparse.weights, "index_weights"),
            )
        return replace(
            weights,
            inputs=inputs,
            queries=queries,
            index=sparse,
            into=LoraHeads(weights.into, target, step, LatentLora.queries),
            out_of=LoraHeads(weights.out_of, target, step, LatentLora.values),
            o=o,
        )

    experts, cross = layer.experts, layer.cross
    if cross is not None:
        # Keys and values are computed outside of steps.
        queries, output = one(cross.queries, "cross_q"), one(cross.output, "cross_o")
        cross = replace(cross, queries=queries, output=output)
    return replace(
        layer,
        cross=cross,
        experts=None if experts is None else LoraMoe(experts, index, step),
        attention=mixer_weights(layer.attention),
        state=None if layer.state is None else state(layer.state),
        mlp=mlp(layer.mlp, ""),
        residual_mlp=mlp(layer.residual_mlp, "residual_"),
    )


def build_layer(
    spec: DecoderSpec, ops: KernelSet, layer: LayerWeights, following: NormWeights, index: int
) -> Layer:
    """Build the layer with this index; `following` is the norm of the next layer, or the last."""

    def norm(weights: NormWeights) -> Norm:
        return make_norm(ops, weights, spec.hidden_size, spec.norm_eps)

    def finished(first: Transform, out_norm: NormWeights) -> Transform:
        """Append the norm and the factor that precede the residual."""
        after: list[Transform] = [] if out_norm.kind == "none" else [norm(out_norm)]
        if spec.residual_scale != 1.0:
            after.append(Scale(spec.residual_scale))
        return chain(first, *after)

    def state_mixer(weights: StateWeights) -> StateMixer:
        output = scaled(weights.output, weights.state.output_scale)
        return make_mixer(ops, weights, finished(output, out_norm), spec.norm_eps)

    out_norm, attention = layer.attention_out_norm, layer.attention
    mixer: TokenMixer | None = None
    if isinstance(attention, StateWeights):
        mixer = state_mixer(attention)
    elif isinstance(attention, LatentWeights):
        mixer = MlaAttention(
            ops=ops,
            weights=attention,
            output=finished(attention.o, out_norm),
            heads=spec.num_heads,
            scale=spec.attention_scale,
            neox=spec.rope_neox,
            round_inputs=spec.round_attention,
            index=_make_index(ops, attention),
        )
    elif attention is not None:
        mixer = _make_attention(spec, ops, attention, keeps_keys=spec.kv_source(index) == index)
        output = scaled(attention.o, spec.attention_output_scale)
        mixer.output = finished(output, out_norm)
        if layer.state is not None:
            mixer = AttentionAndState(mixer, state_mixer(layer.state))
    after = norm(following)
    block: Transform | None = layer.experts
    if layer.mlp is not None:
        block = mlp_of(ops, layer.mlp, spec.mlp_gate_scale)
        block = scaled(block, spec.mlp_output_scale)
    if layer.altup is not None and layer.mlp is not None and isinstance(mixer, SelfAttention):
        return _make_altup_layer(spec, ops, layer, layer.altup, layer.mlp, mixer, index)
    if (shared := layer.shared) is not None and isinstance(attention, StateWeights):
        return SharedBlockLayer(
            SharedBlock(
                make_norm(ops, shared.attention_norm, 2 * spec.hidden_size, spec.norm_eps),
                _make_attention(spec, ops, shared.attention),
                norm(shared.mlp_norm),
                mlp_of(ops, shared.mlp),
                shared.output,
            ),
            norm(shared.mixer_norm),
            state_mixer(attention),
            after,
        )
    if block is None or mixer is None:
        if mixer is not None:
            return MixerLayer(mixer, after)
        if block is not None:
            return MlpLayer(finished(block, layer.mlp_out_norm), after)
        raise ValueError("A layer must have attention, a state, an MLP or experts.")
    mlp = finished(block, layer.mlp_out_norm)
    mlp_norm = None if layer.mlp_norm is None else norm(layer.mlp_norm)
    if layer.residual_mlp is not None:
        residual_mlp = mlp_of(ops, layer.residual_mlp)
        experts_norm = mlp_norm or NoNorm()
        return ResidualExpertsLayer(
            mixer, norm(layer.residual_norm), residual_mlp, experts_norm, mlp, after
        )
    if layer.wiring == "parallel":
        return ParallelLayer(mixer, mlp_norm, mlp, after)
    if layer.cross is not None and isinstance(mixer, SelfAttention):
        cross = CrossAttention(
            ops=ops,
            queries=layer.cross.queries,
            output=layer.cross.output,
            head_dim=spec.head_dim,
            scale=spec.attention_scale or spec.head_dim**-0.5,
            round_inputs=spec.round_attention,
        )
        cross_norm, post = norm(layer.cross.norm), layer.wiring == "post"
        return CrossLayer(mixer, cross_norm, cross, mlp_norm or NoNorm(), mlp, after, post)
    if spec.normed_residual:
        full, state, mlp_factor = spec.normed_residual
        factor = state if isinstance(attention, StateWeights) else full
        return NormedResidualLayer(mixer, factor, mlp_norm or NoNorm(), mlp, mlp_factor, after)
    return SequentialLayer(mixer, mlp_norm or NoNorm(), mlp, after)


def _make_altup_layer(
    spec: DecoderSpec,
    ops: KernelSet,
    layer: LayerWeights,
    weights: AltUpWeights,
    mlp: MlpWeights,
    attention: SelfAttention,
    index: int,
) -> AltUpLayer:
    hidden, eps = spec.hidden_size, spec.norm_eps

    def norm(weights: NormWeights) -> Norm:
        return make_norm(ops, weights, hidden, eps)

    cut = [SparseGate(weights.sparsity)] if weights.sparsity else []
    act = gated_activation(ops, mlp.activation)
    return AltUpLayer(
        index=index,
        altup=AltUp(router_norm=norm(weights.router_norm), weights=weights),
        input_norm=norm(weights.input_norm),
        laurel=chain(weights.laurel_down, weights.laurel_up, norm(weights.laurel_norm)),
        attention=attention,
        mlp_norm=norm(layer.mlp_norm or NO_NORM),
        mlp=chain(mlp.up, *cut, act, mlp.down, norm(layer.mlp_out_norm)),
        gated_activation=act,
        projection=chain(weights.projection, norm(weights.projection_norm)),
    )


def _make_attention(
    spec: DecoderSpec, ops: KernelSet, weights: AttentionWeights, *, keeps_keys: bool = True
) -> SelfAttention:
    return SelfAttention(
        ops=ops,
        project=chain(weights.qkv, *_qkv_transforms(spec, ops, weights, keeps_keys=keeps_keys)),
        output=weights.o,
        sizes=(
            spec.q_size * (2 if spec.attention_output_gate else 1),
            spec.kv_size,
            spec.kv_size,
        ),
        gated=spec.attention_output_gate,
        head_dim=spec.head_dim,
        scale=spec.attention_scale or spec.head_dim**-0.5,
        eps=spec.norm_eps,
        cos_sin=weights.cos_sin,
        neox=spec.rope_neox,
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
        keeps_keys=keeps_keys,
        window=weights.window,
        sparse=weights.sparse,
        soft_cap=spec.attention_soft_cap,
        alibi_slopes=weights.alibi,
        distance_bias=weights.distance_bias,
        sinks=weights.sinks,
        round_inputs=spec.round_attention,
    )


def _make_index(ops: KernelSet, weights: LatentWeights) -> SparseIndex | None:
    latents = weights.latents
    if latents.index is None or weights.index is None:
        return None
    return SparseIndex(
        ops=ops,
        spec=latents.index,
        latents=latents,
        weights=weights.index,
        cos_sin=weights.cos_sin,
    )


def _qkv_transforms(
    spec: DecoderSpec, ops: KernelSet, weights: AttentionWeights, *, keeps_keys: bool
) -> list[Transform]:
    """Return the transforms of queries, keys and values before rotation."""
    transforms: list[Transform] = []
    if weights.q_full_norm is not None and weights.k_full_norm is not None:
        norms = weights.q_full_norm, weights.k_full_norm
        transforms.append(QKRMSNorm(ops, *norms, spec.norm_eps, weights.local_columns))
    if weights.q_head_norm is not None:
        transforms.append(_head_norm(spec, weights.q_head_norm, 0, spec.num_heads))
    if weights.k_head_norm is not None:
        transforms.append(_head_norm(spec, weights.k_head_norm, spec.q_size, spec.num_kv_heads))
    if spec.value_norm and keeps_keys:
        transforms.append(
            ValueRMSNorm(ops, spec.q_size + spec.kv_size, spec.head_dim, spec.norm_eps)
        )
    if spec.clip_qkv:
        transforms.append(ClampQKV(spec.clip_qkv))
    return transforms


def _head_norm(
    spec: DecoderSpec, norm: HeadNormWeights, start: int, heads: int
) -> PerHeadLayerNorm:
    return PerHeadLayerNorm(start, heads, spec.head_dim, norm.weight, norm.bias, spec.norm_eps)
