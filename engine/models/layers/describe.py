"""Describes a decoder: its linear layers, norms and tables by their names in checkpoints."""

from __future__ import annotations

from engine.models.decoder_spec import (
    AltUpSpec,
    CrossAttentionSpec,
    DecoderSpec,
    MambaSpec,
    MlaSpec,
    MoeSpec,
    SharedBlockSpec,
    SparseIndexSpec,
)
from engine.models.layers.linear import (
    AltUpDescription,
    AltUpModelDescription,
    AttentionDescription,
    CrossDescription,
    FusedLinear,
    LatentDescription,
    LayerDescription,
    LinearPart,
    MlpDescription,
    ModelDescription,
    MoeBlock,
    NormDescription,
    RowOrder,
    SharedBlockDescription,
    SparseIndexDescription,
    Split,
    StateDescription,
    TableDescription,
    described_linears,
)
from kernels.interface import ActivationSpec


def describe(spec: DecoderSpec) -> ModelDescription:
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
        altup=None if spec.altup is None else _altup_model(spec, spec.altup),
    )


def describe_layer(spec: DecoderSpec, index: int) -> LayerDescription:
    names, prefix = spec.names, spec.names.layer.format(index)
    moe = spec.moe if spec.moe is not None and spec.moe.layers[index] else None
    has_residual_mlp = moe is not None and spec.residual_size > 0

    def norm(name: str) -> NormDescription:
        return NormDescription(prefix + name if name else "", spec.hidden_size)

    up = tuple(prefix + name for name in names.up)
    shares = spec.wiring == "parallel" and not has_residual_mlp and not names.mlp_norm
    attention, state = _token_mixers(spec, index, prefix)
    mlp: MlpDescription | MoeBlock | None = None
    if not spec.has_mlp or spec.has_mlp[index]:
        inner = spec.intermediate_size
        mlp = (
            _mlp(spec, up, prefix + names.down, inner)
            if moe is None
            else _experts(spec, prefix, moe)
        )
    shares = shares or mlp is None or attention is None
    block = None
    if spec.shared is not None and spec.shared.sources[index] >= 0:
        block = _shared_block(spec, spec.shared, index)
    input_norm = norm(names.attention_norm)
    if block is not None or spec.altup is not None or (spec.wiring == "post" and not index):
        input_norm = norm("")
    elif spec.wiring == "post":
        previous = names.layer.format(index - 1) + names.attention_norm
        input_norm = NormDescription(previous, spec.hidden_size)
    return LayerDescription(
        wiring="residual_experts" if has_residual_mlp else spec.wiring,
        input_norm=input_norm,
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
        shared=block,
        altup=None if spec.altup is None else _altup(spec, spec.altup, index, prefix),
        cross=None if spec.cross is None else _cross(spec, spec.cross, prefix),
    )


def _altup(spec: DecoderSpec, altup: AltUpSpec, index: int, prefix: str) -> AltUpDescription:
    hidden, count, size = spec.hidden_size, altup.num_states, altup.per_layer_size

    def linear(name: str, rows: int, columns: int, quantized: bool = True) -> FusedLinear:
        return _linear(prefix + name, rows, columns, False, quantized=quantized)

    def norm(name: str) -> NormDescription:
        return NormDescription(prefix + name, hidden)

    return AltUpDescription(
        input_norm=norm(spec.names.attention_norm),
        router_norm=norm("altup.router_norm"),
        router=linear("altup.modality_router", count, hidden, quantized=False),
        prediction=linear("altup.prediction_coefs", count * count, count, quantized=False),
        correction=linear("altup.correction_coefs", count, count, quantized=False),
        output_scale=f"{prefix}altup.correct_output_scale" if altup.scales_output else "",
        laurel_down=linear("laurel.linear_left", altup.laurel_rank, hidden),
        laurel_up=linear("laurel.linear_right", hidden, altup.laurel_rank),
        laurel_norm=norm("laurel.post_laurel_norm"),
        gate=linear("per_layer_input_gate", size, hidden),
        projection=linear("per_layer_projection", hidden, size),
        projection_norm=norm("post_per_layer_input_norm"),
        sparsity=altup.sparsity[index],
    )


def _altup_model(spec: DecoderSpec, altup: AltUpSpec) -> AltUpModelDescription:
    hidden, size = spec.hidden_size, altup.per_layer_size
    model = spec.names.embedding.rpartition(".")[0]

    def squares(name: str) -> tuple[FusedLinear, ...]:
        names = (f"{model}.{name}.{number}" for number in range(altup.num_states - 1))
        return tuple(_linear(part, hidden, hidden, False) for part in names)

    return AltUpModelDescription(
        table=f"{model}.embed_tokens_per_layer",
        projection=_linear(
            f"{model}.per_layer_model_projection", spec.num_layers * size, hidden, False
        ),
        projection_norm=NormDescription(f"{model}.per_layer_projection_norm", size),
        expand=squares("altup_projections"),
        collapse=squares("altup_unembed_projections"),
    )


def _shared_block(spec: DecoderSpec, shared: SharedBlockSpec, index: int) -> SharedBlockDescription:
    hidden, inner, number = spec.hidden_size, spec.intermediate_size, shared.occurrence(index)
    layer_prefix = spec.names.layer.format(index)
    source = f"{spec.names.layer.format(shared.sources[index])}shared_transformer."
    attention, mlp = f"{source}self_attn.", f"{source}feed_forward."
    sizes = {"q": spec.q_size, "k": spec.kv_size, "v": spec.kv_size}
    qkv = FusedLinear(
        parts=tuple(LinearPart(f"{attention}{of}_proj", rows) for of, rows in sizes.items()),
        columns=2 * hidden,
    )
    up = (LinearPart(f"{mlp}gate_up_proj", 2 * inner),)
    return SharedBlockDescription(
        attention_norm=NormDescription(f"{source}input_layernorm", 2 * hidden),
        attention=AttentionDescription(
            qkv=qkv,
            o=_linear(f"{attention}o_proj", hidden, spec.q_size, False),
            qk_norm="",
            q_norm="",
            k_norm="",
            kv_heads=spec.num_kv_heads,
            rope=spec.rope,
            window=0,
            sinks="",
        ),
        qkv_adapters=tuple(f"{attention}linear_{of}_adapter_list.{number}." for of in sizes)
        if shared.adapts_attention
        else (),
        mlp_norm=NormDescription(f"{source}pre_ff_layernorm", hidden),
        mlp=MlpDescription(
            FusedLinear(parts=up, columns=hidden, bias=spec.mlp_bias),
            _linear(f"{mlp}down_proj", hidden, inner, spec.mlp_bias),
            ActivationSpec(spec.activation),
            gated=True,
        ),
        up_adapter=f"{mlp}gate_up_proj_adapter_list.{number}.",
        adapter_rank=shared.adapter_rank,
        output=_linear(f"{layer_prefix}linear", hidden, hidden, False),
        mixer_norm=NormDescription(f"{layer_prefix}mamba_decoder.input_layernorm", hidden),
    )


def _cross(spec: DecoderSpec, cross: CrossAttentionSpec, prefix: str) -> CrossDescription:
    hidden, kv_size = spec.hidden_size, spec.kv_size
    parts = (
        LinearPart(prefix + cross.keys, kv_size, has_bias=cross.key_bias),
        LinearPart(prefix + cross.values, kv_size),
    )
    return CrossDescription(
        norm=NormDescription(prefix + cross.norm, hidden),
        queries=_linear(prefix + cross.queries, spec.q_size, hidden, cross.bias, "rows"),
        kv=FusedLinear(parts=parts, columns=hidden, bias=cross.bias, split="rows"),
        output=_linear(prefix + cross.output, hidden, spec.q_size, cross.bias, "columns"),
    )


def _linear(
    name: str, rows: int, columns: int, bias: bool, split: Split = "", quantized: bool = True
) -> FusedLinear:
    parts = (LinearPart(name, rows),)
    return FusedLinear(parts=parts, columns=columns, bias=bias, split=split, quantized=quantized)


def _token_mixers(
    spec: DecoderSpec, index: int, prefix: str
) -> tuple[
    AttentionDescription | StateDescription | LatentDescription | None, StateDescription | None
]:
    """Return a layer's attention, latents or state, and the state in parallel to its attention."""
    state = None
    has_block = spec.shared is not None and spec.shared.sources[index] >= 0
    if spec.states is not None and spec.states.layers[index]:
        state_prefix = f"{prefix}mamba_decoder." if has_block else prefix
        state = _state(spec, spec.states, index, state_prefix)
    if has_block or not spec.has_attention(index):
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
    keeps_keys = spec.kv_source(index) == index
    order: RowOrder = ""
    weights = names.qkv if keeps_keys else names.qkv[:1]
    if not keeps_keys:
        sizes = (queries,)
    elif len(names.qkv) == 1:
        sizes = (sum(sizes),)
        order = "grouped" if spec.qkv_layout == "grouped" else ""
    elif spec.layer_kv_heads:
        order = "repeated"
    parts = tuple(
        LinearPart(prefix + name, rows, has_bias=spec.key_bias or index != 1)
        for index, (name, rows) in enumerate(zip(weights, sizes, strict=True))
    )
    return AttentionDescription(
        qkv=FusedLinear(
            parts=parts, columns=spec.hidden_size, bias=spec.qkv_bias, split="rows", order=order
        ),
        o=_linear(prefix + names.o, spec.hidden_size, spec.q_size, spec.o_bias, "columns"),
        qk_norm=spec.qk_norm,
        q_norm=prefix + names.q_norm if spec.qk_norm else "",
        k_norm=prefix + names.k_norm if spec.qk_norm and keeps_keys else "",
        kv_heads=kv_heads,
        rope=spec.rope_of(index),
        window=spec.sliding_windows[index] if spec.sliding_windows else 0,
        sinks=prefix + names.sinks if spec.sinks else "",
        sparse=spec.sparse if spec.sparse_layers and spec.sparse_layers[index] else None,
        keeps_keys=keeps_keys,
    )


def _latents(spec: DecoderSpec, latents: MlaSpec, prefix: str) -> LatentDescription:
    heads, rank = spec.num_heads, latents.query_rank
    name, rows = latents.queries, heads * latents.query_size
    queries = None
    if rank:
        queries = _linear(prefix + latents.query_heads, rows, rank, False, "rows")
        name, rows = latents.query_latent, rank
    parts = (
        LinearPart(prefix + name, rows),
        LinearPart(prefix + latents.latent, latents.latent_rows),
    )
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
        index=None if latents.index is None else _index(spec, latents, latents.index, prefix),
    )


def _index(
    spec: DecoderSpec, latents: MlaSpec, index: SparseIndexSpec, prefix: str
) -> SparseIndexDescription:
    hidden, queries = spec.hidden_size, index.num_heads * index.head_dim
    return SparseIndexDescription(
        queries=_linear(prefix + index.queries, queries, latents.query_rank, False),
        keys=_linear(prefix + index.keys, index.head_dim, hidden, False),
        key_norm=NormDescription(prefix + index.key_norm, index.head_dim),
        weights=_linear(prefix + index.weights, index.num_heads, hidden, False, quantized=False),
    )


def _state(spec: DecoderSpec, state: MambaSpec, index: int, prefix: str) -> StateDescription:
    hidden, values = spec.hidden_size, state.values

    def name(relative: str) -> str:
        return prefix + relative if relative else ""

    rates = selection = gates = None
    if state.x_proj:
        rates = _linear(prefix + state.dt_proj, values, state.dt_rank, False)
        selection = _linear(prefix + state.x_proj, sum(state.x_sizes), values, False)
    elif state.separate_inputs:
        rates = _linear(prefix + state.dt_proj, state.keys, state.dt_rank, False)
        gates = _linear(prefix + state.output_gate, values, state.dt_rank, False)
    elif state.dt_proj:
        rates = _linear(prefix + state.dt_proj, 2 * state.num_heads, hidden, state.bias)
    inputs = [LinearPart(prefix + state.inputs, state.input_rows)]
    if state.separate_inputs:
        sizes = zip(state.separate_inputs, state.input_sizes, strict=True)
        inputs = [LinearPart(prefix + part, size) for part, size in sizes]
    elif state.output_gate:
        inputs = [
            LinearPart(prefix + state.inputs, state.channels),
            LinearPart(prefix + state.output_gate, values),
        ]
    norms = (state.dt_norm, state.key_norm, state.query_norm)
    return StateDescription(
        state=state,
        inputs=FusedLinear(parts=tuple(inputs), columns=hidden, bias=state.bias, split="rows"),
        selection=selection,
        rates=rates,
        gates=gates,
        conv=tuple(prefix + part for part in state.conv),
        decay=name(state.decay),
        fixed_decays=state.fixed_decays[index] if state.fixed_decays else (),
        rate_bias=name(state.rate_bias),
        skip=name(state.skip),
        norm=NormDescription(
            name(state.gated_norm),
            state.value_size if state.kind in ("delta", "kda") else values,
        ),
        output=_linear(prefix + state.output, hidden, values, state.bias, "columns"),
        selection_norms=tuple(
            NormDescription(name(norm), size)
            for norm, size in zip(norms, state.x_sizes, strict=True)
            if selection is not None
        ),
        head_gates=tuple(
            prefix + gate for gate in (state.input_gate, state.recurrence_gate) if gate
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


def count_parameters(spec: DecoderSpec) -> int:
    """Return the number of parameters of tables and layers, without norms and biases."""
    layers = describe(spec).layers
    # Layers may share some of them.
    linears = {linear for layer in layers for linear in described_linears(layer)}
    blocks = [layer.mlp for layer in layers if isinstance(layer.mlp, MoeBlock)]
    inner = sum(block.moe.num_experts * block.moe.intermediate_size for block in blocks)
    tables = (1 if spec.tie_embeddings else 2) * spec.vocab_size + spec.num_positions
    return (
        sum(linear.rows * linear.columns for linear in linears)
        + ((3 if spec.gated else 2) * inner + tables) * spec.hidden_size
    )
