"""The wirings of a layer: attention then MLP, both beside each other, or MLP and experts.

A layer takes x, which is its own norm of the residual, and gives the next layer's: so that adding
to the residual and the norm that follows are one kernel. In the last layer `rows` names the tokens
that are wanted further on; where tokens no longer meet, the others are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from engine.models.decoder_spec import (
    CrossAttentionSpec,
    DecoderSpec,
    MambaSpec,
    MlaSpec,
    MoeSpec,
)
from engine.models.forward_context import AttentionMetadata
from engine.models.layers.attention import (
    ClampQKV,
    CrossAttention,
    PerHeadLayerNorm,
    QKRMSNorm,
    SelfAttention,
)
from engine.models.layers.linear import (
    AttentionDescription,
    AttentionWeights,
    CrossDescription,
    CrossWeights,
    FusedLinear,
    LatentDescription,
    LatentWeights,
    LayerDescription,
    LayerWeights,
    LinearPart,
    MeetingWeights,
    MlpDescription,
    MlpWeights,
    ModelDescription,
    MoeBlock,
    NormDescription,
    RowOrder,
    Split,
    StateDescription,
    StateWeights,
    TableDescription,
)
from engine.models.layers.mamba import Mamba1Mixer, MambaMixer, ShortConvMixer, make_mixer
from engine.models.layers.mla import MlaAttention
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
from engine.models.lora import LoraContext, LoraLinear, LoraMoe
from kernels import KernelSet, LinearLayer
from kernels.interface import ActivationSpec, HeadNormWeights, NormWeights


def describe(spec: DecoderSpec) -> ModelDescription:
    """All of a model."""
    names = spec.names
    head = TableDescription(
        names.embedding if spec.tie_embeddings else names.lm_head,
        spec.lm_head_bias,
        spec.normalized_head,
        spec.suppressed_tokens,
    )
    return ModelDescription(
        embedding=None if spec.tie_embeddings else TableDescription(names.embedding),
        head=head,
        positions=names.positions if spec.num_positions else "",
        embedding_norm=NormDescription(names.embedding_norm, spec.hidden_size),
        layers=tuple(describe_layer(spec, index) for index in range(spec.num_layers)),
        final_norm=NormDescription(names.final_norm, spec.hidden_size),
    )


def describe_layer(spec: DecoderSpec, index: int) -> LayerDescription:
    """One layer of it."""
    names, prefix = spec.names, spec.names.layer.format(index)
    moe = spec.moe if spec.moe is not None and spec.moe.layers[index] else None
    has_residual_mlp = moe is not None and spec.residual_size > 0

    def norm(name: str) -> NormDescription:
        return NormDescription(prefix + name if name else "", spec.hidden_size)

    up = tuple(prefix + name for name in names.up)
    shares = spec.wiring == "parallel" and not has_residual_mlp and not names.mlp_norm
    attention, state = _meeting(spec, index, prefix)
    mlp: MlpDescription | MoeBlock | None = None
    if not spec.has_mlp or spec.has_mlp[index]:
        inner = spec.intermediate_size
        mlp = (
            _mlp(spec, up, prefix + names.down, inner)
            if moe is None
            else _experts(spec, prefix, moe)
        )
    shares = shares or mlp is None or attention is None
    return LayerDescription(
        wiring="residual_experts" if has_residual_mlp else spec.wiring,
        input_norm=norm(names.attention_norm),
        attention=attention,
        attention_out_norm=norm(names.attention_out_norm),
        state=state,
        mlp_norm=None if shares else norm(names.mlp_norm),
        mlp=mlp,
        mlp_out_norm=norm(names.mlp_out_norm),
        residual_norm=norm(names.residual_norm) if has_residual_mlp else None,
        residual_mlp=_mlp(
            spec,
            tuple(prefix + name for name in names.residual_up),
            prefix + names.residual_down,
            spec.residual_size,
        )
        if has_residual_mlp
        else None,
        cross=None if spec.cross is None else _cross(spec, spec.cross, prefix),
    )


def _cross(spec: DecoderSpec, cross: CrossAttentionSpec, prefix: str) -> CrossDescription:
    hidden, kv_size = spec.hidden_size, spec.kv_size
    parts = (
        LinearPart(prefix + cross.keys, kv_size, has_bias=False),
        LinearPart(prefix + cross.values, kv_size),
    )
    return CrossDescription(
        norm=NormDescription(prefix + cross.norm, hidden),
        queries=_linear(prefix + cross.queries, spec.q_size, hidden, True, "rows"),
        kv=FusedLinear(parts=parts, columns=hidden, bias=True, split="rows"),
        output=_linear(prefix + cross.output, hidden, spec.q_size, True, "columns"),
    )


def _linear(
    name: str, rows: int, columns: int, bias: bool, split: Split = "", quantized: bool = True
) -> FusedLinear:
    parts = (LinearPart(name, rows),)
    return FusedLinear(parts=parts, columns=columns, bias=bias, split=split, quantized=quantized)


def _meeting(
    spec: DecoderSpec, index: int, prefix: str
) -> tuple[
    AttentionDescription | StateDescription | LatentDescription | None, StateDescription | None
]:
    """What lets a layer's tokens meet, and the state beside it."""
    state = None
    if spec.states is not None and spec.states.layers[index]:
        state = _state(spec, spec.states, prefix)
    if index not in spec.attention_layers:
        return state, None
    if spec.latents is not None:
        return _latents(spec, spec.latents, prefix), state
    return _attention(spec, index, prefix), state


def _attention(spec: DecoderSpec, index: int, prefix: str) -> AttentionDescription:
    names = spec.names
    kv_heads = spec.layer_kv_heads[index] if spec.layer_kv_heads else spec.num_kv_heads
    kv_size = kv_heads * spec.head_dim
    queries = spec.q_size * (2 if spec.attention_output_gate else 1)
    sizes: tuple[int, ...] = (queries, kv_size, kv_size)
    order: RowOrder = ""
    if len(names.qkv) == 1:
        sizes = (sum(sizes),)
        order = "grouped" if spec.qkv_layout == "grouped" else ""
    elif spec.layer_kv_heads:
        order = "repeated"
    parts = tuple(
        LinearPart(prefix + name, rows, has_bias=spec.key_bias or index != 1)
        for index, (name, rows) in enumerate(zip(names.qkv, sizes, strict=True))
    )
    return AttentionDescription(
        qkv=FusedLinear(
            parts=parts, columns=spec.hidden_size, bias=spec.qkv_bias, split="rows", order=order
        ),
        o=_linear(prefix + names.o, spec.hidden_size, spec.q_size, spec.o_bias, "columns"),
        qk_norm=spec.qk_norm,
        q_norm=prefix + names.q_norm if spec.qk_norm else "",
        k_norm=prefix + names.k_norm if spec.qk_norm else "",
        kv_heads=kv_heads,
        rope=spec.rope_of(index),
        window=spec.sliding_windows[index] if spec.sliding_windows else 0,
        sinks=prefix + names.sinks if spec.sinks else "",
        sparse=spec.sparse if spec.sparse_layers and spec.sparse_layers[index] else None,
    )


def _latents(spec: DecoderSpec, latents: MlaSpec, prefix: str) -> LatentDescription:
    heads, rank = spec.num_heads, latents.query_rank
    name, rows = latents.queries, heads * latents.query_size
    queries = None
    if rank:
        queries = _linear(prefix + latents.query_heads, rows, rank, False, "rows")
        name, rows = latents.query_latent, rank
    parts = LinearPart(prefix + name, rows), LinearPart(prefix + latents.latent, latents.width)
    pairs = heads * (latents.qk_nope_head_dim + latents.value_size)
    return LatentDescription(
        latents=latents,
        inputs=FusedLinear(parts=parts, columns=spec.hidden_size, bias=latents.bias),
        queries=queries,
        query_norm=NormDescription(prefix + latents.query_norm if rank else "", rank),
        latent_norm=NormDescription(prefix + latents.latent_norm, latents.kv_lora_rank),
        heads=_linear(
            prefix + latents.heads, pairs, latents.kv_lora_rank, False, "rows", quantized=False
        ),
        o=_linear(
            prefix + spec.names.o,
            spec.hidden_size,
            heads * latents.value_size,
            spec.o_bias,
            "columns",
        ),
        rope=spec.rope,
    )


def _state(spec: DecoderSpec, state: MambaSpec, prefix: str) -> StateDescription:
    hidden, values = spec.hidden_size, state.values

    def name(relative: str) -> str:
        return prefix + relative if relative else ""

    rates = selection = None
    if state.x_proj:
        rates = _linear(prefix + state.dt_proj, values, state.dt_rank, False)
        selection = _linear(prefix + state.x_proj, sum(state.x_sizes), values, False)
    elif state.dt_proj:
        rates = _linear(prefix + state.dt_proj, 2 * state.num_heads, hidden, state.bias)
    norms = (state.dt_norm, state.key_norm, state.query_norm)
    return StateDescription(
        state=state,
        inputs=_linear(prefix + state.inputs, state.input_rows, hidden, state.bias),
        selection=selection,
        rates=rates,
        conv=prefix + state.conv,
        decay=name(state.decay),
        rate_bias=name(state.rate_bias),
        skip=name(state.skip),
        norm=NormDescription(
            name(state.gated_norm), state.value_size if state.kind == "delta" else values
        ),
        output=_linear(prefix + state.output, hidden, values, state.bias),
        selection_norms=tuple(
            NormDescription(name(norm), size)
            for norm, size in zip(norms, state.x_sizes, strict=True)
            if selection is not None
        ),
    )


def _mlp(spec: DecoderSpec, up: tuple[str, ...], down: str, inner: int) -> MlpDescription:
    rows = inner * (2 if spec.gated else 1) // len(up)
    return MlpDescription(
        FusedLinear(
            parts=tuple(LinearPart(name, rows) for name in up),
            columns=spec.hidden_size,
            bias=spec.mlp_bias,
            split="rows",
            order="interleaved" if spec.interleaved else "",
        ),
        _linear(down, spec.hidden_size, inner, spec.mlp_bias, "columns"),
        ActivationSpec(spec.activation, spec.activation_limit, spec.activation_alpha),
        spec.gated,
    )


def _experts(spec: DecoderSpec, prefix: str, moe: MoeSpec) -> MoeBlock:
    hidden = spec.hidden_size
    router = _linear(prefix + moe.router, moe.num_experts, hidden, moe.router_bias, quantized=False)
    if not moe.shared_size:
        return MoeBlock(router, moe, prefix)
    first = prefix + moe.shared
    up = tuple(first + name for name in moe.shared_up)
    shared = _mlp(spec, up, first + moe.shared_down, moe.shared_size)
    gate = _linear(prefix + moe.shared_gate, 1, hidden, False, quantized=False)
    return MoeBlock(router, moe, prefix, shared, gate if moe.shared_gate else None)


Mixer = MambaMixer | Mamba1Mixer | ShortConvMixer


@dataclass(slots=True)
class AttentionBesideState:
    """Sum of what attention and a state give for the same tokens.

    Its cache is a pair: of keys and values, and of states.
    """

    attention: SelfAttention | MlaAttention
    mixer: Mixer

    def __call__(self, x: Tensor, context: AttentionMetadata, cache: Any) -> Tensor:
        """[num_tokens, hidden] of the same."""
        keys_and_values, states = cache
        return self.attention(x, context, keys_and_values).add_(self.mixer(x, context, states))


#: What lets tokens meet. Attention takes a `LayerCache`, what carries a state `LayerStateCache`.
Meeting = SelfAttention | MlaAttention | Mixer | AttentionBesideState


@dataclass(slots=True)
class MixerLayer:
    """residual += attention(norm(residual)): no MLP follows."""

    attention: Meeting
    next_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionMetadata,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The next layer's x, and the residual."""
        x = self.attention(x, context, cache)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        return self.next_norm.add_and_norm(x, residual), residual


@dataclass(slots=True)
class MlpLayer:
    """residual += mlp(norm(residual)): tokens don't meet."""

    mlp: Transform
    next_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionMetadata,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The next layer's x, and the residual."""
        if rows is not None:
            x, residual = x[rows], residual[rows]
        return self.next_norm.add_and_norm(self.mlp(x), residual), residual


@dataclass(slots=True)
class SequentialLayer:
    """residual += attention(norm(residual)); residual += mlp(norm(residual))."""

    attention: Meeting
    mlp_norm: Norm
    mlp: Transform
    next_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionMetadata,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The next layer's x, and the residual."""
        x = self.attention(x, context, cache)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        x = self.mlp(self.mlp_norm.add_and_norm(x, residual))
        return self.next_norm.add_and_norm(x, residual), residual


@dataclass(slots=True)
class CrossLayer:
    """residual += attention(norm(residual)); residual += cross(norm'(residual), encoder);
    residual += mlp(norm"(residual)).

    Its cache is a pair: of the tokens, and of the encoder's states.
    """

    attention: SelfAttention
    cross_norm: Norm
    cross: CrossAttention
    mlp_norm: Norm
    mlp: Transform
    next_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionMetadata,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The next layer's x, and the residual."""
        tokens, states = cache
        x = self.attention(x, context, tokens)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        x = self.cross_norm.add_and_norm(x, residual)
        x = self.cross(x, context.other_groups[-1], states, rows)
        x = self.mlp(self.mlp_norm.add_and_norm(x, residual))
        return self.next_norm.add_and_norm(x, residual), residual


@dataclass(slots=True)
class ParallelLayer:
    """residual += attention(norm(residual)) + mlp(norm'(residual)); norm' may be the same norm."""

    attention: Meeting
    mlp_norm: Norm | None
    mlp: Transform
    next_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionMetadata,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The next layer's x, and the residual."""
        attended = self.attention(x, context, cache)
        if rows is not None:
            attended, x, residual = attended[rows], x[rows], residual[rows]
        x = self.mlp(x if self.mlp_norm is None else self.mlp_norm(residual))
        return self.next_norm.add_and_norm(x.add_(attended), residual), residual


@dataclass(slots=True)
class ResidualExpertsLayer:
    """Experts beside attention and the MLP after it (Snowflake's Arctic).

    before = residual; residual += attention(norm(residual));
    residual += mlp(norm'(residual)) + experts(norm"(before)).
    """

    attention: Meeting
    mlp_norm: Norm
    mlp: Transform
    experts_norm: Norm
    experts: Transform
    next_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        context: AttentionMetadata,
        cache: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The next layer's x, and the residual."""
        x = self.attention(x, context, cache)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        chosen = self.experts(self.experts_norm(residual))
        x = self.mlp(self.mlp_norm.add_and_norm(x, residual))
        return self.next_norm.add_and_norm(x.add_(chosen), residual), residual


Layer = SequentialLayer | CrossLayer | ParallelLayer | ResidualExpertsLayer | MixerLayer | MlpLayer


def adapted(ops: KernelSet, layer: LayerWeights, index: int, step: LoraContext) -> LayerWeights:
    """The layer whose linear layers also do what adapters say."""

    def one(linear: LinearLayer, slot: str) -> LinearLayer:
        return LoraLinear(ops, linear, (index, slot), step)

    def mlp(weights: MlpWeights | None, prefix: str) -> MlpWeights | None:
        if weights is None:
            return None
        up, down = one(weights.up, f"{prefix}up"), one(weights.down, f"{prefix}down")
        return replace(weights, up=up, down=down)

    def state(weights: StateWeights) -> StateWeights:
        rates = None if weights.rates is None else one(weights.rates, "state_rates")
        selection = weights.selection
        return replace(
            weights,
            inputs=one(weights.inputs, "state_in"),
            selection=None if selection is None else one(selection, "state_selection"),
            rates=rates,
            output=one(weights.output, "state_out"),
        )

    def meeting(weights: MeetingWeights | None) -> MeetingWeights | None:
        if weights is None:
            return None
        if isinstance(weights, StateWeights):
            return state(weights)
        if isinstance(weights, AttentionWeights):
            return replace(weights, qkv=one(weights.qkv, "qkv"), o=one(weights.o, "o"))
        queries = None if weights.queries is None else one(weights.queries, "latent_q")
        inputs, o = one(weights.inputs, "latent_in"), one(weights.o, "o")
        return replace(weights, inputs=inputs, queries=queries, o=o)

    experts = layer.experts
    return replace(
        layer,
        experts=None if experts is None else LoraMoe(experts, index, step),
        attention=meeting(layer.attention),
        state=None if layer.state is None else state(layer.state),
        mlp=mlp(layer.mlp, ""),
        residual_mlp=mlp(layer.residual_mlp, "residual_"),
    )


def build_layer(
    spec: DecoderSpec, ops: KernelSet, layer: LayerWeights, following: NormWeights
) -> Layer:
    """One layer; `following` is the norm of the next one, or the last."""

    def norm(weights: NormWeights) -> Norm:
        return make_norm(ops, weights, spec.hidden_size, spec.norm_eps)

    def finished(first: Transform, out_norm: NormWeights) -> Transform:
        """With the norm and the factor that come before the residual."""
        after: list[Transform] = [] if out_norm.kind == "none" else [norm(out_norm)]
        if spec.residual_scale != 1.0:
            after.append(Scale(spec.residual_scale))
        return chain(first, *after)

    def mixer(weights: StateWeights) -> Mixer:
        output = scaled(weights.output, weights.state.output_scale)
        return make_mixer(ops, weights, finished(output, out_norm), spec.norm_eps)

    out_norm, attention = layer.attention_out_norm, layer.attention
    meeting: Meeting | None = None
    if isinstance(attention, StateWeights):
        meeting = mixer(attention)
    elif isinstance(attention, LatentWeights):
        meeting = MlaAttention(
            ops=ops,
            weights=attention,
            output=finished(attention.o, out_norm),
            heads=spec.num_heads,
            scale=spec.attention_scale,
            neox=spec.rope_neox,
            round_inputs=spec.round_attention,
        )
    elif attention is not None:
        meeting = _make_attention(spec, ops, attention)
        output = scaled(attention.o, spec.attention_output_scale)
        meeting.output = finished(output, out_norm)
        if layer.state is not None:
            meeting = AttentionBesideState(meeting, mixer(layer.state))
    after = norm(following)
    block: Transform | None = layer.experts
    if layer.mlp is not None:
        block = mlp_of(ops, layer.mlp, spec.mlp_gate_scale)
        block = scaled(block, spec.mlp_output_scale)
    if block is None or meeting is None:
        if meeting is not None:
            return MixerLayer(meeting, after)
        if block is not None:
            return MlpLayer(finished(block, layer.mlp_out_norm), after)
        raise ValueError("A layer must have attention, a state, an MLP or experts.")
    mlp = finished(block, layer.mlp_out_norm)
    mlp_norm = None if layer.mlp_norm is None else norm(layer.mlp_norm)
    if layer.residual_mlp is not None:
        residual_mlp = mlp_of(ops, layer.residual_mlp)
        experts_norm = mlp_norm or NoNorm()
        return ResidualExpertsLayer(
            meeting, norm(layer.residual_norm), residual_mlp, experts_norm, mlp, after
        )
    if layer.wiring == "parallel":
        return ParallelLayer(meeting, mlp_norm, mlp, after)
    if layer.cross is not None and isinstance(meeting, SelfAttention):
        cross_norm, cross = norm(layer.cross.norm), _make_cross(spec, ops, layer.cross)
        return CrossLayer(meeting, cross_norm, cross, mlp_norm or NoNorm(), mlp, after)
    return SequentialLayer(meeting, mlp_norm or NoNorm(), mlp, after)


def _make_attention(spec: DecoderSpec, ops: KernelSet, weights: AttentionWeights) -> SelfAttention:
    return SelfAttention(
        ops=ops,
        project=chain(weights.qkv, *_qkv_transforms(spec, ops, weights)),
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
        window=weights.window,
        sparse=weights.sparse,
        soft_cap=spec.attention_soft_cap,
        alibi_slopes=weights.alibi,
        sinks=weights.sinks,
        round_inputs=spec.round_attention,
    )


def _make_cross(spec: DecoderSpec, ops: KernelSet, weights: CrossWeights) -> CrossAttention:
    return CrossAttention(
        ops=ops,
        queries=weights.queries,
        output=weights.output,
        head_dim=spec.head_dim,
        scale=spec.attention_scale or spec.head_dim**-0.5,
        round_inputs=spec.round_attention,
    )


def _qkv_transforms(
    spec: DecoderSpec, ops: KernelSet, weights: AttentionWeights
) -> list[Transform]:
    """What happens to queries, keys and values before they are rotated."""
    transforms: list[Transform] = []
    if weights.q_full_norm is not None and weights.k_full_norm is not None:
        transforms.append(QKRMSNorm(ops, weights.q_full_norm, weights.k_full_norm, spec.norm_eps))
    if weights.q_head_norm is not None:
        transforms.append(_head_norm(spec, weights.q_head_norm, 0, spec.num_heads))
    if weights.k_head_norm is not None:
        transforms.append(_head_norm(spec, weights.k_head_norm, spec.q_size, spec.num_kv_heads))
    if spec.clip_qkv:
        transforms.append(ClampQKV(spec.clip_qkv))
    return transforms


def _head_norm(
    spec: DecoderSpec, norm: HeadNormWeights, start: int, heads: int
) -> PerHeadLayerNorm:
    return PerHeadLayerNorm(start, heads, spec.head_dim, norm.weight, norm.bias, spec.norm_eps)
