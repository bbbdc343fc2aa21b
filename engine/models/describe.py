"""A `DecoderSpec`'s model, layer by layer: `ModelDescription`."""

from __future__ import annotations

from engine.models.description import (
    AttentionDescription,
    ExpertsDescription,
    LatentDescription,
    LayerDescription,
    LinearDescription,
    LinearPart,
    MlpDescription,
    ModelDescription,
    NormDescription,
    RowOrder,
    Split,
    StateDescription,
    TableDescription,
)
from engine.models.spec import DecoderSpec, LatentSpec, MoeSpec, StateSpec
from kernels.interface import ActivationSpec


def describe(spec: DecoderSpec) -> ModelDescription:
    """All of a model."""
    names = spec.names
    head = TableDescription(
        names.embedding if spec.tie_embeddings else names.lm_head,
        spec.lm_head_bias,
        spec.normalized_head,
        spec.hidden_tokens,
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
    names, at = spec.names, spec.names.layer.format(index)
    moe = spec.moe if spec.moe is not None and spec.moe.layers[index] else None
    beside = moe is not None and spec.residual_size > 0

    def norm(name: str) -> NormDescription:
        return NormDescription(at + name if name else "", spec.hidden_size)

    up = tuple(at + name for name in names.up)
    shares = spec.wiring == "parallel" and not beside and not names.mlp_norm
    return LayerDescription(
        wiring="residual_experts" if beside else spec.wiring,
        input_norm=norm(names.attention_norm),
        attention=_meeting(spec, index, at),
        attention_out_norm=norm(names.attention_out_norm),
        mlp_norm=None if shares else norm(names.mlp_norm),
        mlp=_mlp(spec, up, at + names.down, spec.intermediate_size)
        if moe is None
        else _experts(spec, at, moe),
        mlp_out_norm=norm(names.mlp_out_norm),
        residual_norm=norm(names.residual_norm) if beside else None,
        residual_mlp=_mlp(
            spec,
            tuple(at + name for name in names.residual_up),
            at + names.residual_down,
            spec.residual_size,
        )
        if beside
        else None,
    )


def _linear(
    name: str, rows: int, columns: int, bias: bool, split: Split = "", quantized: bool = True
) -> LinearDescription:
    parts = (LinearPart(name, rows),)
    return LinearDescription(
        parts=parts, columns=columns, bias=bias, split=split, quantized=quantized
    )


def _meeting(
    spec: DecoderSpec, index: int, at: str
) -> AttentionDescription | StateDescription | LatentDescription:
    if spec.states is not None and spec.states.layers[index]:
        return _state(spec, spec.states, at)
    if spec.latents is not None:
        return _latents(spec, spec.latents, at)
    return _attention(spec, index, at)


def _attention(spec: DecoderSpec, index: int, at: str) -> AttentionDescription:
    names = spec.names
    kv_heads = spec.layer_kv_heads[index] if spec.layer_kv_heads else spec.num_kv_heads
    kv_size = kv_heads * spec.head_dim
    queries = spec.q_size * (2 if spec.gated_attention else 1)
    sizes: tuple[int, ...] = (queries, kv_size, kv_size)
    order: RowOrder = ""
    if len(names.qkv) == 1:
        sizes = (sum(sizes),)
        order = "grouped" if spec.qkv_layout == "grouped" else ""
    elif spec.layer_kv_heads:
        order = "repeated"
    parts = tuple(LinearPart(at + name, rows) for name, rows in zip(names.qkv, sizes, strict=True))
    return AttentionDescription(
        qkv=LinearDescription(
            parts=parts, columns=spec.hidden_size, bias=spec.qkv_bias, split="rows", order=order
        ),
        o=_linear(at + names.o, spec.hidden_size, spec.q_size, spec.o_bias, "columns"),
        qk_norm=spec.qk_norm,
        q_norm=at + names.q_norm if spec.qk_norm else "",
        k_norm=at + names.k_norm if spec.qk_norm else "",
        kv_heads=kv_heads,
        rope=spec.rope_of(index),
        window=spec.windows[index] if spec.windows else 0,
        sinks=at + names.sinks if spec.sinks else "",
        sparse=spec.sparse if spec.sparse_layers and spec.sparse_layers[index] else None,
    )


def _latents(spec: DecoderSpec, latents: LatentSpec, at: str) -> LatentDescription:
    heads, rank = spec.num_heads, latents.query_rank
    name, rows = latents.queries, heads * latents.query_size
    queries = None
    if rank:
        queries = _linear(at + latents.query_heads, rows, rank, False, "rows")
        name, rows = latents.query_latent, rank
    parts = LinearPart(at + name, rows), LinearPart(at + latents.latent, latents.width)
    pairs = heads * (latents.plain_size + latents.value_size)
    return LatentDescription(
        latents=latents,
        inputs=LinearDescription(parts=parts, columns=spec.hidden_size, bias=latents.bias),
        queries=queries,
        query_norm=NormDescription(at + latents.query_norm if rank else "", rank),
        latent_norm=NormDescription(at + latents.latent_norm, latents.rank),
        heads=_linear(at + latents.heads, pairs, latents.rank, False, "rows", quantized=False),
        o=_linear(
            at + spec.names.o, spec.hidden_size, heads * latents.value_size, spec.o_bias, "columns"
        ),
        rope=spec.rope,
    )


def _state(spec: DecoderSpec, state: StateSpec, at: str) -> StateDescription:
    hidden, values, norm_size = spec.hidden_size, state.values, state.values
    if state.kind == "delta":
        norm_size = state.value_size
    return StateDescription(
        state=state,
        inputs=_linear(at + state.inputs, state.input_rows, hidden, state.bias),
        rates=_linear(at + state.rates, 2 * state.num_heads, hidden, state.bias)
        if state.rates
        else None,
        conv=at + state.conv,
        decay=at + state.decay,
        rate_bias=at + state.rate_bias,
        skip=at + state.skip if state.skip else "",
        norm=NormDescription(at + state.gated_norm, norm_size),
        output=_linear(at + state.output, hidden, values, state.bias),
    )


def _mlp(spec: DecoderSpec, up: tuple[str, ...], down: str, inner: int) -> MlpDescription:
    rows = inner * (2 if spec.gated else 1) // len(up)
    return MlpDescription(
        LinearDescription(
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


def _experts(spec: DecoderSpec, at: str, moe: MoeSpec) -> ExpertsDescription:
    hidden = spec.hidden_size
    router = _linear(at + moe.router, moe.num_experts, hidden, moe.router_bias, quantized=False)
    if not moe.shared_size:
        return ExpertsDescription(router, moe, at)
    first = at + moe.shared
    up = tuple(first + name for name in moe.shared_up)
    shared = _mlp(spec, up, first + moe.shared_down, moe.shared_size)
    gate = _linear(at + moe.shared_gate, 1, hidden, False, quantized=False)
    return ExpertsDescription(router, moe, at, shared, gate if moe.shared_gate else None)
