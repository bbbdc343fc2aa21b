"""`DecoderSpec`: all that the native decoder needs to know of an architecture, as data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engine.contract.errors import ModelLoadError
from engine.models.rotary_embedding import RopeSpec
from kernels.attention import BlockSparse


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """Names of weights without `.weight`; the defaults are Llama's.

    `""` means that the family has no such weight. `layer` holds the layer's number as `{}`; names
    of a layer's weights are relative to it. One name in `qkv` (or in `up` of a gated MLP) is one
    fused tensor. `optional_prefix` is left out by some of the family's checkpoints.
    """

    optional_prefix: str = ""
    embedding: str = "model.embed_tokens"
    positions: str = ""
    embedding_norm: str = ""
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"

    layer: str = "model.layers.{}."
    attention_norm: str = "input_layernorm"
    attention_out_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = ""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"

    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"

    #: Of the MLP beside experts.
    residual_norm: str = "residual_layernorm"
    residual_up: tuple[str, ...] = ("residual_mlp.w1", "residual_mlp.w3")
    residual_down: str = "residual_mlp.w2"


Wiring = Literal["sequential", "parallel", "post"]
QKNorm = Literal["", "rms_head", "rms_full", "layer_shared", "layer_heads", "layer_list"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture of experts in place of an MLP. Sizes are in elements.

    Attributes:
        layers: for each layer, whether it has experts (else it has the decoder's plain MLP).
        renormalize: divide the chosen experts' weights by their sum.
        softmax_first: softmax over all experts, then choose; otherwise over the chosen ones only,
            which is the same where `renormalize` holds.
        sigmoid: each score's sigmoid replaces the softmax over all scores.
        choice_bias: name of what is added to scores to choose by them, "": nothing.
        scale: of the chosen experts' weights.
        groups, top_groups, group_best: see `kernels.layers.ExpertLayers`.
        router: name of the router's weight, relative to the layer.
        layout: how the checkpoint keeps experts, see `engine.models.layers.moe`.
        experts: prefix of the experts' names, relative to the layer.
        expert_names: gate, up and down in the layout with one tensor an expert.
        shared_size: intermediate size of the expert that sees every token, 0: there is none.
        shared_up, shared_down: its weights' names behind `shared`; one name in `shared_up`: gate
            over up in one tensor.
        shared_gate: name of that expert's sigmoid gate, "": it has none.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    layers: tuple[bool, ...]
    renormalize: bool = True
    softmax_first: bool = True
    sigmoid: bool = False
    choice_bias: str = ""
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    router: str = "mlp.gate"
    router_bias: bool = False
    bias: bool = False
    layout: Literal["split", "interleaved", "flat", "granite", "transposed"] = "split"
    experts: str = "mlp.experts."
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_size: int = 0
    shared: str = "mlp.shared_expert."
    shared_up: tuple[str, ...] = ("gate_proj", "up_proj")
    shared_down: str = "down_proj"
    shared_gate: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """Layers that carry a state from token to token in the place of attention: a product, a short
    convolution, a recurrence of heads (`kernels.ssm`), a gated norm, a product. Sizes are in
    elements; names are relative to the layer.

    Attributes:
        kind: "mamba1", whose heads have one value each; "mamba2"; "delta", the gated delta rule;
            "kda", Kimi delta attention (arXiv 2510.26692), whose rates are of keys;
            "lightning", linear attention, whose convolution is of one token with weight 1;
            "rg_lru", the real-gated linear recurrent unit (arXiv 2402.19427), whose heads are
            blocks of channels with a number each for their state;
            "conv": neither recurrence nor norm, whose one head has no keys.
        layers: for each layer, whether it has one of these.
        num_heads, num_key_heads: of values, and of keys and queries.
        value_size, key_size: of a head.
        conv_width: tokens that a convolution sees.
        limits: of the recurrence's rates.
        inputs: name of the first product. "mamba1": values and gates; "mamba2": gate, values, keys,
            queries and rates; "delta": by key head queries, keys, values and gates; "lightning": by
            head queries, keys and values; "conv": gates before and after, values.
        separate_inputs: names of the products that give "kda" its queries, keys, values, the few
            values that `dt_proj` makes rates of, those that `output_gate` makes gates of, betas.
        output_gate: of the product that gives "lightning", "kda" and "rg_lru" their gates.
        input_gate, recurrence_gate: of each head's products of the convolution's result in
            "rg_lru", without `_weight` and `_bias`.
        input_scales: of the parts of the first product of "mamba2"; (): 1.
        output_scale: of the last product.
        dt_proj: of the product that gives "delta" its betas and rates, by key head, and "mamba1"
            its rates, as "kda", of `dt_rank` values.
        x_proj: of the product that gives "mamba1" these values, keys and queries.
        dt_norm, key_norm, query_norm: of what x_proj gives; "": none.
        conv: of the convolution, or of those of parts of its channels; (): its weights are 1.
        fixed_decays: of each layer's heads, below 0; (): the checkpoint has them, by `decay`.
        gated_norm: of what the heads give; "": none.
        norm_before_gate: otherwise the norm comes after the gate.
        dtype: in which the recurrence's state is kept: "float32", "bfloat16" or "int8".
    """

    kind: Literal["mamba1", "mamba2", "delta", "kda", "lightning", "rg_lru", "conv"]
    layers: tuple[bool, ...]
    num_heads: int
    num_key_heads: int
    value_size: int
    key_size: int
    conv_width: int
    conv_bias: bool = False
    bias: bool = False
    limits: tuple[float, float] = (0.0, math.inf)
    inputs: str = "mamba.in_proj"
    separate_inputs: tuple[str, ...] = ()
    output_gate: str = ""
    input_gate: str = ""
    recurrence_gate: str = ""
    input_scales: tuple[float, ...] = ()
    output_scale: float = 1.0
    dt_proj: str = ""
    dt_rank: int = 0
    x_proj: str = ""
    dt_norm: str = ""
    key_norm: str = ""
    query_norm: str = ""
    conv: tuple[str, ...] = ("mamba.conv1d",)
    decay: str = "mamba.A_log"
    fixed_decays: tuple[tuple[float, ...], ...] = ()
    rate_bias: str = "mamba.dt_bias"
    skip: str = "mamba.D"
    gated_norm: str = "mamba.norm"
    norm_before_gate: bool = False
    output: str = "mamba.out_proj"
    dtype: str = "float32"

    @property
    def values(self) -> int:
        """Values of a token, over all heads."""
        return self.num_heads * self.value_size

    @property
    def keys(self) -> int:
        """Keys of a token, over all heads; there are as many queries."""
        return self.num_key_heads * self.key_size

    @property
    def channels(self) -> int:
        """What goes through the convolution: values, and keys and queries where it makes them."""
        values_only = self.kind in ("mamba1", "rg_lru")
        return self.values if values_only else self.values + 2 * self.keys

    @property
    def input_sizes(self) -> tuple[int, ...]:
        """Outputs of the first product, by part."""
        if self.kind == "conv":
            return (self.values,) * 3
        if self.kind in ("mamba1", "rg_lru"):
            return self.values, self.values
        if self.kind == "kda":
            return self.keys, self.keys, self.values, self.dt_rank, self.dt_rank, self.num_heads
        rates = (self.num_heads,) if self.kind == "mamba2" else ()
        return self.values, self.values, self.keys, self.keys, *rates

    @property
    def input_rows(self) -> int:
        """Outputs of the first product."""
        return sum(self.input_sizes)

    @property
    def x_sizes(self) -> tuple[int, int, int]:
        """Outputs of x_proj: of rates, keys, queries."""
        return self.dt_rank, self.keys, self.keys

    def num_parameters(self, hidden: int) -> int:
        """Of a layer's products."""
        selection = (sum(self.x_sizes) + self.dt_rank) if self.x_proj else 0
        if self.kind == "kda":
            selection = 2 * self.dt_rank
        if self.kind == "rg_lru":
            selection = 2 * self.value_size
        return hidden * (self.input_rows + self.values) + self.values * selection

    @property
    def nbytes(self) -> int:
        """Of what a sequence keeps over all layers."""
        conv = 4 * (self.conv_width - 1) * self.channels
        vector = {"float32": 4, "bfloat16": 2, "int8": 1}[self.dtype] * self.key_size
        return sum(self.layers) * (conv + self.values * (vector + 4 * (self.dtype == "int8")))


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseIndexSpec:
    """What chooses the tokens that a query attends to (DeepSeek Sparse Attention, arXiv
    2512.02556): those with the best sums, over heads, of products with an index key that each token
    keeps beside its latent. Names are relative to the layer.

    Attributes:
        num_heads, head_dim: of index queries; the key has one head.
        top_k: tokens that are chosen.
        queries: of the layer that makes index queries of the queries' latent.
        keys, key_norm: of the layer that makes keys of the hidden state, and of their LayerNorm.
        weights: of the layer that makes heads' weights of the hidden state.
    """

    num_heads: int
    head_dim: int
    top_k: int
    queries: str = "self_attn.indexer.wq_b"
    keys: str = "self_attn.indexer.wk"
    key_norm: str = "self_attn.indexer.k_norm"
    weights: str = "self_attn.indexer.weights_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", 2.1): a token keeps one latent,
    from which all heads' keys and values are made, and one rotated key that they share. Sizes are
    in elements; names are relative to the layer.

    Attributes:
        query_rank: of the queries' own latent; 0: they are made of the hidden state.
        kv_lora_rank: of the latent.
        qk_nope_head_dim: of a head's queries and keys, what isn't rotated; qk_rope_head_dim: what
        is.
        value_size: of a head's values.
        norm_eps: of the latents' norms.
        bias: whether the layers that make latents have one.
        queries: of the layer that makes queries of the hidden state.
        query_latent, query_norm, query_heads: in its place where queries have a latent.
        latent: of the layer that gives the latent, then what is rotated.
        heads: of each head's keys over its values, of the latent.
        index: what chooses the tokens that are attended to; None: all of them are.
    """

    query_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    value_size: int
    norm_eps: float = 1e-6
    bias: bool = False
    queries: str = "self_attn.q_proj"
    query_latent: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_heads: str = "self_attn.q_b_proj"
    latent: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    heads: str = "self_attn.kv_b_proj"
    index: SparseIndexSpec | None = None

    @property
    def width(self) -> int:
        """Values that a token keeps: what is rotated, then an index key, then the latent."""
        index_dim = 0 if self.index is None else self.index.head_dim
        return self.latent_rows + index_dim

    @property
    def latent_rows(self) -> int:
        """Outputs of the layer that gives the latent and what is rotated."""
        return self.qk_rope_head_dim + self.kv_lora_rank

    @property
    def query_size(self) -> int:
        """Of a head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def num_parameters(self, hidden: int, heads: int) -> int:
        """Of the layers before and after attention, norms and biases left out."""
        queries = heads * self.query_size
        query_parameters = (
            self.query_rank * (hidden + queries) if self.query_rank else hidden * queries
        )
        pairs = heads * (self.qk_nope_head_dim + self.value_size)
        return (
            query_parameters
            + hidden * self.latent_rows
            + self.kv_lora_rank * pairs
            + heads * self.value_size * hidden
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec:
    """Attention of every layer to the states of an encoder, after attention to the tokens. Heads
    are those of the decoder; names are relative to the layer.

    Attributes:
        length: most states that the encoder gives.
        bias: whether its linear layers have one, `key_bias`: keys too.
        norm: before it.
        queries, keys, values, output: its linear layers.
    """

    length: int
    bias: bool = True
    key_bias: bool = True
    norm: str = "encoder_attn_layer_norm"
    queries: str = "encoder_attn.q_proj"
    keys: str = "encoder_attn.k_proj"
    values: str = "encoder_attn.v_proj"
    output: str = "encoder_attn.out_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeBiasSpec:
    """Biases of scores by how far a key is before its query, in buckets that are exact near and
    logarithmic far (T5, arXiv 1910.10683); all layers share them.

    Attributes:
        name: of the table [num_buckets, num_heads].
        max_distance: from which on all keys are in the last bucket.
    """

    name: str
    num_buckets: int
    max_distance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlockSpec:
    """Blocks of attention and an MLP whose weights several layers share (Zamba 2, arXiv
    2411.15242), each layer with low ranks of its own added to them. Names are Zamba 2's.

    Attributes:
        sources: for each layer the one whose weights its block has; -1: it has no block.
        adapter_rank: of what is added.
        adapts_attention: to queries, keys and values; to the MLP's first product always.
    """

    sources: tuple[int, ...]
    adapter_rank: int
    adapts_attention: bool

    def occurrence(self, layer: int) -> int:
        """How many layers before this one have a block."""
        return sum(source >= 0 for source in self.sources[:layer])


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpSpec:
    """Several hidden states a token, and an embedding for each layer (Gemma 3n); see
    `engine.models.layers.altup`. Names are Gemma 3n's.

    Attributes:
        num_states: of a token; the first is active.
        scales_output: whether the active state is scaled before it meets a layer's embedding.
        laurel_rank: of the residual beside attention.
        per_layer_size: values of a token's embedding for one layer.
        per_layer_vocab_size: tokens that have one; others have that of token 0.
        sparsity: for each layer, the share of the MLP's gates that are 0.
    """

    num_states: int
    scales_output: bool
    laurel_rank: int
    per_layer_size: int
    per_layer_vocab_size: int
    sparsity: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Shapes and switches of a decoder. Lengths are in elements.

    Attributes:
        wiring: "sequential": attention, then MLP; "parallel": both from the same residual.
        norm: RMSNorm or LayerNorm (`norm_weight`, `norm_bias`: has it these), eps `norm_eps`.
        norm_offset: what is added to norm weights at load (Gemma's 1 + w).
        qk_norm: "": none; "rms_head": RMS of each head; "rms_full": RMS over all heads;
            "layer_shared", "layer_heads", "layer_list": LayerNorm of each head, with one weight for
            all heads, one weight [heads, head_dim], or one tensor a head.
        kv_sources: for each layer the one whose keys and values it attends to, which for layers
            that keep their own is itself; (): all do.
        value_norm: values are RMS-normed by head, without a weight.
        layer_kv_heads: KV heads that the checkpoint has, by layer, where they differ; each is kept
            as often as the layer with the most needs it.
        qkv_layout: of a fused tensor: "stacked" queries, keys, values, or "grouped" by KV head:
            its queries, its key, its value.
        transposed: linear weights are kept as [in, out].
        clip_qkv: queries, keys and values are clamped to +- this; 0: they aren't.
        sliding_windows: layer i's sliding window in tokens (a token sees itself and window - 1
        before it),
            0 for full attention.
        sparse, sparse_layers: blocks of tokens that a query sees, and for each layer whether it
            goes by them; (): none does.
        bidirectional_span: tokens of a picture, which see each other; 0: tokens see those before.
        rope: rotary embedding of the layers; None: no rotation.
        layer_ropes: rotary embedding by layer, where they differ.
        rope_neox: rotate halves; otherwise neighbours.
        alibi_slopes: by query head; (): no ALiBi.
        relative_bias: by distance; None: there is none.
        attention_output_gate: each head's queries come with a gate, whose sigmoid weighs what the
        head
            finds.
        states: layers that carry a state in the place of attention or beside it; None: there are
            none.
        attends: for each layer whether it has attention; (): those that carry no state have.
        has_mlp: for each layer whether it has an MLP or experts; (): all have. A layer without it,
            or with nothing else, has one norm.
        attention_output_scale, mlp_output_scale: of their last products.
        normed_residual: factors of the residual, which is then what the last norm gave, before what
            attention, a state, the MLP gives is added to it; (): the residual isn't normed.
        mlp_gate_scale: of what the MLP activates.
        latents: attention is over latents, one KV head of `head_dim` values that are keys and
            values both; None: over keys and values.
        shared: blocks before the states of some layers, of which several have the same weights;
            None: there are none.
        altup: several hidden states a token; None: there is one.
        cross: attention to an encoder's states; None: there is no encoder.
        key_bias: whether keys have one where `qkv_bias` says so.
        sinks: each head has a learned logit that takes part in the softmax.
        attention_scale: of q.k; 0: 1 / sqrt(head_dim).
        round_attention: attention may round queries, and the weights of values, to bfloat16.
        num_positions, position_offset: learned positions, rows of the table and its first row.
        activation: "silu", "gelu", "gelu_tanh", "relu", "relu2" or "swiglu_clamped".
        residual_size: intermediate size of an MLP that runs after attention, beside a layer's
            experts, which then see what attention saw; 0: there is none.
        normalized_head: the output layer's rows are brought to length 1.
        gated: the MLP multiplies the activated half with another one.
        interleaved: rows of both halves take turns, where one tensor holds them.
        suppressed_tokens: never come, whatever their logits are.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    kv_sources: tuple[int, ...] = ()
    value_norm: bool = False
    layer_kv_heads: tuple[int, ...] = ()
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    names: WeightNames = field(default_factory=WeightNames)
    wiring: Wiring = "sequential"

    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_weight: bool = True
    norm_bias: bool = False
    norm_offset: float = 0.0

    qkv_bias: bool = False
    key_bias: bool = True
    o_bias: bool = False
    qkv_layout: Literal["stacked", "grouped"] = "stacked"
    transposed: bool = False
    qk_norm: QKNorm = ""
    qk_norm_bias: bool = False
    clip_qkv: float = 0.0
    rope: RopeSpec | None = None
    layer_ropes: tuple[RopeSpec | None, ...] = ()
    rope_neox: bool = True
    sliding_windows: tuple[int, ...] = ()
    sparse: BlockSparse | None = None
    sparse_layers: tuple[bool, ...] = ()
    bidirectional_span: int = 0
    attention_scale: float = 0.0
    round_attention: bool = False
    attention_soft_cap: float = 0.0
    alibi_slopes: tuple[float, ...] = ()
    relative_bias: RelativeBiasSpec | None = None
    sinks: bool = False
    attention_output_gate: bool = False
    attention_output_scale: float = 1.0
    states: MambaSpec | None = None
    attends: tuple[bool, ...] = ()
    has_mlp: tuple[bool, ...] = ()
    latents: MlaSpec | None = None
    shared: SharedBlockSpec | None = None
    altup: AltUpSpec | None = None
    cross: CrossAttentionSpec | None = None

    activation: str = "silu"
    activation_limit: float = 0.0
    activation_alpha: float = 1.702
    gated: bool = True
    interleaved: bool = False
    mlp_bias: bool = False
    mlp_gate_scale: float = 1.0
    mlp_output_scale: float = 1.0
    moe: MoeSpec | None = None
    residual_size: int = 0

    num_positions: int = 0
    position_offset: int = 0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    normed_residual: tuple[float, ...] = ()
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    tie_embeddings: bool = False
    normalized_head: bool = False
    lm_head_bias: bool = False
    suppressed_tokens: tuple[int, ...] = ()

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"

    @property
    def q_size(self) -> int:
        """Columns of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the key (and of the value) projection."""
        return self.num_kv_heads * self.head_dim

    def slice_layers(self, layers: range) -> DecoderSpec:
        """Return the spec of a model with only some of the layers."""

        def part(by_layer: tuple[Any, ...]) -> tuple[Any, ...]:
            return by_layer[layers.start : layers.stop]

        moe, states = self.moe, self.states
        return replace(
            self,
            num_layers=len(layers),
            layer_kv_heads=part(self.layer_kv_heads),
            layer_ropes=part(self.layer_ropes),
            sliding_windows=part(self.sliding_windows),
            sparse_layers=part(self.sparse_layers),
            attends=part(self.attends),
            has_mlp=part(self.has_mlp),
            moe=None if moe is None else replace(moe, layers=part(moe.layers)),
            states=None
            if states is None
            else replace(
                states, layers=part(states.layers), fixed_decays=part(states.fixed_decays)
            ),
        )

    def rope_of(self, layer: int) -> RopeSpec | None:
        """Rotary embedding of one layer."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that keep keys and values."""
        return tuple(
            layer
            for layer in range(self.num_layers)
            if self.has_attention(layer) and self.kv_source(layer) == layer
        )

    def has_attention(self, layer: int) -> bool:
        """Whether a layer attends."""
        return self.attends[layer] if self.attends else not self.carries_state[layer]

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to."""
        return self.kv_sources[layer] if self.kv_sources else layer

    @property
    def carries_state(self) -> tuple[bool, ...]:
        """For each layer whether it carries a state."""
        return (False,) * self.num_layers if self.states is None else self.states.layers

    @property
    def kv_windows(self) -> tuple[int, ...]:
        """Windows of the layers that keep keys and values; (): all are full."""
        return tuple(
            self.sliding_windows[layer] for layer in self.attention_layers if self.sliding_windows
        )

    @property
    def num_parameters(self) -> int:
        """Parameters of the tables and the layers (norms and biases left out)."""
        matrices = 3 if self.gated else 2
        attending = len(self.attention_layers)
        per_layer = (3 if self.attention_output_gate else 2) * self.q_size + 2 * self.kv_size
        if self.latents is not None:
            latents = self.latents.num_parameters(self.hidden_size, self.num_heads)
            per_layer = latents // self.hidden_size
        per_block, attention = per_layer, attending * per_layer
        if self.states is not None:
            per_layer = self.states.num_parameters(self.hidden_size)
            attention += sum(self.states.layers) * per_layer // self.hidden_size
        if self.cross is not None:
            attention += self.num_layers * 2 * (self.q_size + self.kv_size)
        num_mlps = sum(self.has_mlp) if self.has_mlp else self.num_layers
        if self.shared is not None:
            blocks = len(set(self.shared.sources) - {-1})
            # Queries, keys and values are made of the hidden state beside the embedding.
            attention += blocks * (3 * self.q_size + 4 * self.kv_size) - attending * per_block
            num_mlps = blocks
        mlps = num_mlps * matrices * self.intermediate_size
        if self.moe is not None:
            moe, with_experts = self.moe, sum(self.moe.layers)
            experts = moe.num_experts * moe.intermediate_size + moe.shared_size
            mlps += with_experts * matrices * (experts - self.intermediate_size)
            mlps += with_experts * moe.num_experts
        tables = (1 if self.tie_embeddings else 2) * self.vocab_size + self.num_positions
        return (attention + mlps + tables) * self.hidden_size

    @property
    def state_bytes(self) -> int:
        """Of what a sequence keeps beside keys and values."""
        return 0 if self.states is None else self.states.nbytes

    def kv_bytes_per_token(self, element_size: int, num_layers: int | None = None) -> int:
        """Bytes of KV cache that one token takes over `num_layers` layers, by default all."""
        layers = len(self.attention_layers) if num_layers is None else num_layers
        planes = 2 if self.latents is None else 1
        return planes * layers * self.kv_size * element_size


#: How many there are, in config.json.
COUNT = "num_nextn_predict_layers"
#: Families of which they are run.
FAMILIES = (
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
)


def num_mtp_layers(config: dict[str, Any]) -> int:
    """By config.json. Raises `ModelLoadError` for what is no number of layers."""
    count = config.get(COUNT) or 0
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= 64:
        raise ModelLoadError(
            f"config.json: {COUNT} must be a whole number in [0, 64], got {count!r:.80}.",
            param=COUNT,
        )
    return count


def drop_mtp_weights(names: Iterable[str], spec: DecoderSpec, config: dict[str, Any]) -> list[str]:
    """Those of a checkpoint's names that belong to none of them."""
    if spec.architecture not in FAMILIES:
        return list(names)
    layers = range(spec.num_layers, spec.num_layers + num_mtp_layers(config))
    prefixes = tuple(spec.names.layer.format(layer) for layer in layers)
    return [name for name in names if not name.startswith(prefixes)]


def with_mtp_layer(spec: DecoderSpec) -> DecoderSpec:
    """The model with the first of them as its last layer."""
    moe = spec.moe
    return replace(
        spec,
        num_layers=spec.num_layers + 1,
        sliding_windows=(*spec.sliding_windows, 0),
        moe=None if moe is None else replace(moe, layers=(*moe.layers, True)),
    )
