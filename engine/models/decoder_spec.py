"""`DecoderSpec`: a decoder's architecture as data."""

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

    A family without a weight has `""`. `layer` contains `{}` for the layer's index, and names of
    a layer's weights are relative to it. A single name in `qkv` (or in `up` of a gated MLP) stands
    for a fused tensor. Some checkpoints of the family omit `optional_prefix`.
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

    #: Names of the MLP beside experts.
    residual_norm: str = "residual_layernorm"
    residual_up: tuple[str, ...] = ("residual_mlp.w1", "residual_mlp.w3")
    residual_down: str = "residual_mlp.w2"


Wiring = Literal["sequential", "parallel", "post"]
QKNorm = Literal["", "rms_head", "rms_full", "layer_shared", "layer_heads", "layer_list"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture of experts instead of an MLP. Sizes are numbers of elements.

    Attributes:
        layers: for each layer, whether it has experts; otherwise it has the decoder's dense MLP.
        renormalize: divide the chosen experts' weights by their sum.
        softmax_first: softmax over all experts before choosing, otherwise over the chosen ones
            only, which is equivalent with `renormalize`.
        sigmoid: use each score's sigmoid instead of the softmax over all scores.
        choice_bias: the name of a bias that is added to the scores for choosing only; "" for none.
        scale: the factor of the chosen experts' weights.
        groups, top_groups, group_best: see `kernels.layers.ExpertLayers`.
        router: the name of the router's weight, relative to the layer.
        layout: the checkpoint's layout of the experts, see `engine.models.layers.moe`.
        experts: the prefix of the experts' names, relative to the layer.
        expert_names: gate, up and down in the layout with separate tensors for each expert.
        shared_size: the intermediate size of the shared expert, which every token uses; 0 for none.
        shared_up, shared_down: names of its weights after the prefix `shared`; a single name in
            `shared_up` stands for one tensor with gate's rows before up's.
        shared_gate: the name of the shared expert's sigmoid gate; "" for none.
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
    """Layers with a recurrent state instead of attention: input projection, short convolution,
    recurrence by head (`kernels.ssm`), gated norm, output projection. Sizes are numbers of
    elements; names are relative to the layer.

    Attributes:
        kind: "mamba1", whose heads have one value each; "mamba2"; "delta", the gated delta rule;
            "kda", Kimi delta attention (arXiv 2510.26692), with a rate for each key;
            "lightning", linear attention without a convolution (width 1, weight 1);
            "rg_lru", the real-gated linear recurrent unit (arXiv 2402.19427), whose heads are
            blocks of channels, each channel with one number as its state;
            "conv", a convolution without recurrence and norm, with one head and no keys.
        layers: for each layer, whether it is one of these.
        num_heads, num_key_heads: the numbers of heads of values, and of keys and queries.
        value_size, key_size: the sizes of a head.
        conv_width: the number of tokens in the convolution's window.
        limits: the minimum and maximum of the recurrence's rates.
        inputs: the input projection. Its outputs are values and gates for "mamba1"; gate, values,
            keys, queries and rates for "mamba2"; queries, keys, values and gates by key head for
            "delta"; queries, keys and values by head for "lightning"; gates before and after the
            convolution, and values for "conv".
        separate_inputs: projections to the queries, keys and values of "kda", to the inputs of
            `dt_proj` and of `output_gate`, and to the betas.
        output_gate: the projection to the gates of "lightning", "kda" and "rg_lru".
        input_gate, recurrence_gate: each head's projections of the convolution's result in
            "rg_lru", without `_weight` and `_bias`.
        input_scales: factors of the parts of the input projection of "mamba2"; () for 1.
        output_scale: the factor of the output projection.
        dt_proj: the projection to the betas and rates of "delta", by key head, or from `dt_rank`
            values to the rates of "mamba1" and "kda".
        x_proj: the projection to the inputs of `dt_proj`, the keys and the queries of "mamba1".
        dt_norm, key_norm, query_norm: norms of the outputs of x_proj; "" for none.
        conv: the convolution, or several convolutions over parts of the channels; () for weights
            of 1.
        fixed_decays: decays of each layer's heads, below 0; () if the checkpoint has `decay`.
        gated_norm: the norm of the heads' outputs; "" for none.
        norm_before_gate: whether the norm precedes the gate.
        dtype: the dtype of the recurrence's state: "float32", "bfloat16" or "int8".
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
        """Number of values per token in all heads."""
        return self.num_heads * self.value_size

    @property
    def keys(self) -> int:
        """Number of keys per token in all heads, and of queries."""
        return self.num_key_heads * self.key_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, and for most kinds also keys and queries."""
        values_only = self.kind in ("mamba1", "rg_lru")
        return self.values if values_only else self.values + 2 * self.keys

    @property
    def conv_sizes(self) -> tuple[int, ...]:
        """Channels of the convolution, by part."""
        if self.kind in ("delta", "kda"):
            return self.keys, self.keys, self.values
        return (self.values, self.keys, self.keys) if self.kind == "mamba2" else (self.channels,)

    @property
    def input_sizes(self) -> tuple[int, ...]:
        """Outputs of the input projection, by part."""
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
        """Outputs of the input projection."""
        return sum(self.input_sizes)

    @property
    def x_sizes(self) -> tuple[int, int, int]:
        """Outputs of x_proj: inputs of dt_proj, keys, queries."""
        return self.dt_rank, self.keys, self.keys

    @property
    def nbytes(self) -> int:
        """Bytes of a sequence's states in all layers."""
        conv = 4 * (self.conv_width - 1) * self.channels
        vector = {"float32": 4, "bfloat16": 2, "int8": 1}[self.dtype] * self.key_size
        return sum(self.layers) * (conv + self.values * (vector + 4 * (self.dtype == "int8")))


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseIndexSpec:
    """Selection of the tokens that a query attends to (DeepSeek Sparse Attention, arXiv
    2512.02556): each token has an index key in the cache beside its latent, and the tokens with
    the best weighted sums over heads of relu(index query . index key) are selected. Names are
    relative to the layer.

    Attributes:
        num_heads, head_dim: the number and size of index queries' heads; the key has one head.
        top_k: the number of selected tokens.
        queries: the projection from the queries' latent to index queries.
        keys, key_norm: the projection from the hidden state to index keys, and their LayerNorm.
        weights: the projection from the hidden state to the heads' weights.
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
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", 2.1): the cache has one latent
    per token, from which all heads' keys and values are computed, and one rotated key that they
    share. Sizes are numbers of elements; names are relative to the layer.

    Attributes:
        query_rank: the size of the queries' own latent; 0 if queries come from the hidden state.
        kv_lora_rank: the size of the latent.
        qk_nope_head_dim, qk_rope_head_dim: the sizes of the unrotated and the rotated part of a
            head's queries and keys.
        value_size: the size of a head's values.
        norm_eps: epsilon of the latents' norms.
        bias: whether the projections to latents have biases.
        queries: the projection from the hidden state to queries.
        query_latent, query_norm, query_heads: its replacement for queries with a latent.
        latent: the projection to the latent, followed by the shared key before its rotation.
        heads: the projection from the latent to each head's keys, followed by its values.
        index: selects the tokens that are attended to; None for all.
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
        """Number of cached values per token: the rotated key, an index key, the latent."""
        index_dim = 0 if self.index is None else self.index.head_dim
        return self.latent_rows + index_dim

    @property
    def latent_rows(self) -> int:
        """Outputs of the projection to the latent and the shared key."""
        return self.qk_rope_head_dim + self.kv_lora_rank

    @property
    def query_size(self) -> int:
        """Size of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec:
    """Attention of every layer to the states of an encoder, after self-attention. It has the
    decoder's heads; names are relative to the layer.

    Attributes:
        length: the maximum number of states from the encoder.
        bias: whether its linear layers have biases; `key_bias`: whether that of keys has one, too.
        norm: the norm before it.
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
    """Biases of attention scores by the distance from a key to its query, in buckets that are exact
    for short distances and logarithmic for long ones (T5, arXiv 1910.10683). All layers share them.

    Attributes:
        name: the name of the table [num_buckets, num_heads].
        max_distance: the distance from which on all keys are in the last bucket.
    """

    name: str
    num_buckets: int
    max_distance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlockSpec:
    """Blocks of attention and an MLP whose weights several layers share (Zamba 2, arXiv
    2411.15242), with low-rank adapters for each layer. Names are Zamba 2's.

    Attributes:
        sources: for each layer, the index of the layer with its block's weights; -1 for no block.
        adapter_rank: the rank of the adapters.
        adapts_attention: whether the projection to queries, keys and values has adapters; the
            MLP's up projection always has one.
    """

    sources: tuple[int, ...]
    adapter_rank: int
    adapts_attention: bool

    def occurrence(self, layer: int) -> int:
        """Return the number of layers with a block before this one."""
        return sum(source >= 0 for source in self.sources[:layer])


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpSpec:
    """Several hidden states per token, and embeddings for each layer (Gemma 3n); see
    `engine.models.layers.altup`. Names are Gemma 3n's.

    Attributes:
        num_states: the number of states per token; the first is active.
        scales_output: whether the corrected active state is scaled before it gates the layer's
            embedding.
        laurel_rank: the rank of the augmented residual beside attention.
        per_layer_size: the size of a token's embedding for one layer.
        per_layer_vocab_size: the number of tokens with such embeddings; others use token 0's.
        sparsity: for each layer, the share of the MLP's gates that become 0.
    """

    num_states: int
    scales_output: bool
    laurel_rank: int
    per_layer_size: int
    per_layer_vocab_size: int
    sparsity: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Sizes and options of a decoder. Sizes are numbers of elements.

    Attributes:
        wiring: "sequential" for attention, then MLP; "parallel" for both from the same residual;
            "post" for norms of the sums of residual and output, which are the next residual.
        norm: RMSNorm or LayerNorm with epsilon `norm_eps`, and with a weight and a bias by
            `norm_weight` and `norm_bias`.
        norm_offset: added to norm weights at load (1 for Gemma's 1 + w).
        qk_norm: "" for none; "rms_head": RMSNorm of each head; "rms_full": RMSNorm over all heads;
            "layer_shared", "layer_heads", "layer_list": LayerNorm of each head with one weight for
            all heads, one weight [heads, head_dim], or one tensor per head.
        kv_sources: for each layer, the index of the layer whose keys and values it uses, its own
            if it has them; () if all have them.
        value_norm: whether values have an RMSNorm by head, without a weight.
        layer_kv_heads: the checkpoint's numbers of KV heads by layer, if they differ; at load,
            heads are repeated up to `num_kv_heads`.
        qkv_layout: the rows of a fused tensor: "stacked" for queries, keys, values, or "grouped"
            by KV head into its queries, its key, its value.
        transposed: whether the checkpoint's linear weights are [in, out].
        clip_qkv: clamps queries, keys and values to +- this; 0 for no limit.
        sliding_windows: each layer's sliding window in tokens (a token attends to itself and to
            the window - 1 tokens before it), 0 for full attention; () if all are full.
        sparse, sparse_layers: blocks of tokens that a query attends to, and for each layer whether
            it is block-sparse; () if none is.
        bidirectional_span: the number of tokens of an image, which attend to each other; 0 for
            causal attention.
        rope: the layers' rotary embedding; None without rotation.
        layer_ropes: rotary embedding by layer, if they differ.
        rope_neox: whether rotation pairs elements of both halves; otherwise adjacent elements.
        alibi_slopes: slopes by query head; () without ALiBi.
        relative_bias: biases by distance; None for none.
        attention_output_gate: whether each head's query is followed by a gate, whose sigmoid
            multiplies the head's output.
        states: layers with a recurrent state instead of attention or beside it; None for none.
        attends: for each layer, whether it has attention; () if those without a state have.
        has_mlp: for each layer, whether it has an MLP or experts; () if all have. A layer with
            nothing but attention (or a state) or nothing but an MLP has one norm.
        attention_output_scale, mlp_output_scale: factors of their output projections.
        normed_residual: the residual's factors before the output of attention, of a state, of the
            MLP is added to it. The residual is then the last norm's output. () otherwise.
        mlp_gate_scale: the factor of the MLP's gate before the activation.
        latents: multi-head latent attention, with one KV head whose `head_dim` values are both key
            and value; None for keys and values.
        shared: blocks with shared weights before the states of some layers; None for none.
        altup: several hidden states per token; None for one.
        cross: attention to an encoder's states; None without an encoder.
        key_bias: whether the key projection has a bias if `qkv_bias` is set.
        sinks: whether each head has a learned logit that takes part in the softmax.
        attention_scale: the factor of q.k; 0 for 1 / sqrt(head_dim).
        round_attention: allow rounding queries and softmax weights to bfloat16.
        num_positions, position_offset: the rows of the learned position table, and the row of
            position 0.
        activation: "silu", "gelu", "gelu_tanh", "relu", "relu2" or "swiglu_clamped".
        residual_size: the intermediate size of an MLP after attention in layers whose experts have
            attention's input instead; 0 for none.
        normalized_head: whether the output layer's rows are scaled to length 1.
        gated: whether the MLP multiplies the activated half with another half.
        interleaved: whether the rows of both halves alternate in a fused tensor.
        suppressed_tokens: tokens that are never generated.
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
        """Return a layer's rotary embedding."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers with keys and values of their own."""
        return tuple(
            layer
            for layer in range(self.num_layers)
            if self.has_attention(layer) and self.kv_source(layer) == layer
        )

    def has_attention(self, layer: int) -> bool:
        return self.attends[layer] if self.attends else not self.carries_state[layer]

    def kv_source(self, layer: int) -> int:
        """Return the index of the layer whose keys and values a layer uses."""
        return self.kv_sources[layer] if self.kv_sources else layer

    @property
    def carries_state(self) -> tuple[bool, ...]:
        """For each layer, whether it has a state."""
        return (False,) * self.num_layers if self.states is None else self.states.layers

    @property
    def kv_windows(self) -> tuple[int, ...]:
        """Windows of the layers with keys and values of their own; () if all are full."""
        return tuple(
            self.sliding_windows[layer] for layer in self.attention_layers if self.sliding_windows
        )

    @property
    def num_parameters(self) -> int:
        """Number of parameters of tables and layers, without norms and biases."""
        from engine.models.layers.describe import count_parameters  # imports this module

        return count_parameters(self)

    @property
    def state_bytes(self) -> int:
        """Bytes per sequence beside keys and values."""
        return 0 if self.states is None else self.states.nbytes

    def kv_bytes_per_token(self, element_size: int, num_layers: int | None = None) -> int:
        """Return the bytes of KV cache per token in `num_layers` layers, by default all."""
        layers = len(self.attention_layers) if num_layers is None else num_layers
        planes = 2 if self.latents is None else 1
        return planes * layers * self.kv_size * element_size


#: The number of MTP layers in config.json.
COUNT = "num_nextn_predict_layers"
#: Architectures whose MTP layers are supported.
FAMILIES = (
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
)


def num_mtp_layers(config: dict[str, Any]) -> int:
    """Read the number of MTP layers. Raises `ModelLoadError` unless it is an integer in [0, 64]."""
    count = config.get(COUNT) or 0
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= 64:
        raise ModelLoadError(
            f"config.json: {COUNT} must be a whole number in [0, 64], got {count!r:.80}.",
            param=COUNT,
        )
    return count


def drop_mtp_weights(names: Iterable[str], spec: DecoderSpec, config: dict[str, Any]) -> list[str]:
    """Return a checkpoint's names without those of MTP layers."""
    if spec.architecture not in FAMILIES:
        return list(names)
    layers = range(spec.num_layers, spec.num_layers + num_mtp_layers(config))
    prefixes = tuple(spec.names.layer.format(layer) for layer in layers)
    return [name for name in names if not name.startswith(prefixes)]


def with_mtp_layer(spec: DecoderSpec) -> DecoderSpec:
    """Return the spec with the first MTP layer as the model's last layer."""
    moe = spec.moe
    return replace(
        spec,
        num_layers=spec.num_layers + 1,
        sliding_windows=(*spec.sliding_windows, 0),
        moe=None if moe is None else replace(moe, layers=(*moe.layers, True)),
    )
