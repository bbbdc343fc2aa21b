"""Descriptions of a model's norms, linear layers and tables by their names in the checkpoint.

`engine.models.layers.describe` creates them from a `DecoderSpec`. Weights are loaded by them, and
code that needs a layer's names (for ranks, adapters, quantized checkpoints) uses them, too. Sizes
are numbers of elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Literal

from engine.models.decoder_spec import MambaSpec, MlaSpec, MoeSpec, QKNorm
from engine.models.rotary_embedding import RopeSpec
from kernels.attention import BlockSparse
from kernels.interface import ActivationSpec

Split = Literal["", "rows", "columns"]
RowOrder = Literal["", "grouped", "repeated", "interleaved"]
Wiring = Literal["sequential", "parallel", "post", "residual_experts"]


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One of the checkpoint's weights in a linear layer.

    Attributes:
        name: the name in the checkpoint, without `.weight`.
        rows: the number of outputs.
        has_bias: whether this part has a bias if the layer has; otherwise its bias is 0.
    """

    name: str
    rows: int
    has_bias: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLinear:
    """A linear layer with stacked parts, [rows, columns].

    Attributes:
        parts: in order; several are fused into one matrix multiplication.
        columns: the number of inputs.
        bias: whether the layer has biases.
        split: how ranks share it: "rows" (each rank computes some outputs), "columns" (likewise,
            and each rank has some of the inputs, which are gathered), or "" (each rank has the
            whole layer, or its heads' rows).
        order: the order of the checkpoint's rows. "grouped": by KV head its queries, its key, its
            value; "repeated": keys and values of fewer heads than the cache has; "interleaved":
            both halves of a gated MLP alternate.
        quantized: whether quantization schemes apply to it.
    """

    parts: tuple[LinearPart, ...]
    columns: int
    bias: bool = False
    split: Split = ""
    order: RowOrder = ""
    quantized: bool = True

    @property
    def rows(self) -> int:
        """The number of outputs in the checkpoint."""
        return sum(part.rows for part in self.parts)


@dataclass(frozen=True, slots=True)
class NormDescription:
    """A norm over `size` values; with `name` "" it returns x unchanged."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionDescription:
    """A layer's attention.

    Attributes:
        qkv, o: the projections before and after.
        qk_norm: the kind of norm of queries and keys, with the weights `q_norm` and `k_norm`.
        kv_heads: the checkpoint's number of KV heads.
        rope: None without rotation.
        window: the sliding window in tokens; 0 for full attention.
        sinks: the name of the heads' learned logits; "" for none.
        sparse: blocks of tokens that are attended to; None for all.
        keeps_keys: whether the layer has keys and values; otherwise `qkv` has queries only, and
            another layer's keys and values are used.
    """

    qkv: FusedLinear
    o: FusedLinear
    qk_norm: QKNorm
    q_norm: str
    k_norm: str
    kv_heads: int
    rope: RopeSpec | None
    window: int
    sinks: str
    sparse: BlockSparse | None = None
    keeps_keys: bool = True

    def linears(self) -> Iterator[tuple[str, FusedLinear]]:
        """Yield its linear layers with their slots."""
        yield "qkv", self.qkv
        yield "o", self.o


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDescription:
    """A recurrent state instead of attention. Names are the checkpoint's.

    Attributes:
        state: its sizes.
        inputs, output: the input and output projections; for "lightning" and "rg_lru", `inputs`
            also has the gates.
        selection: the projection from the convolution's result to the inputs of `rates`, keys and
            queries; or None.
        rates: the projection to rates, or None.
        gates: the projection from a part of the outputs of `inputs` to gates, or None.
        conv: the convolution, or several convolutions over parts of the channels, each [channels,
            1, width]; () for weights of 1.
        decay, rate_bias, skip: vectors with a value for each head (decay of "mamba1": [heads,
            keys]; of "rg_lru": a value for each channel; rate_bias of "kda": for each key); ""
            for none.
        fixed_decays: the heads' decays, instead of `decay`; () if that has a name.
        norm: the norm of the heads' outputs, if any.
        selection_norms: norms of the parts of `selection`; () without it.
        head_gates: each head's projections to gates, without `_weight` and `_bias`; () for none.
    """

    state: MambaSpec
    inputs: FusedLinear
    selection: FusedLinear | None
    rates: FusedLinear | None
    gates: FusedLinear | None
    conv: tuple[str, ...]
    decay: str
    rate_bias: str
    skip: str
    norm: NormDescription
    output: FusedLinear
    fixed_decays: tuple[float, ...] = ()
    selection_norms: tuple[NormDescription, ...] = ()
    head_gates: tuple[str, ...] = ()

    def linears(self) -> Iterator[tuple[str, FusedLinear]]:
        """Yield its linear layers with their slots."""
        yield "state_in", self.inputs
        if self.selection is not None:
            yield "state_selection", self.selection
        if self.rates is not None:
            yield "state_rates", self.rates
        if self.gates is not None:
            yield "state_gates", self.gates
        yield "state_out", self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseIndexDescription:
    """See `SparseIndexSpec`; `key_norm` has a weight and a bias."""

    queries: FusedLinear
    keys: FusedLinear
    key_norm: NormDescription
    weights: FusedLinear

    def linears(self) -> Iterator[tuple[str, FusedLinear]]:
        """Yield its linear layers with their slots."""
        yield "index_q", self.queries
        yield "index_k", self.keys
        yield "index_weights", self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDescription:
    """Multi-head latent attention.

    Attributes:
        latents: its sizes.
        inputs: the projection to queries or their latent, followed by the KV latent and the key
            that is rotated.
        queries: the projection from the queries' latent; None if `inputs` has the queries.
        query_norm, latent_norm: norms of the latents.
        heads: the projection from the latent to each head's keys, followed by its values. It is
            absorbed into queries and outputs, and isn't a layer of its own.
        o: the output projection.
        rope: None without rotation.
        index: selects tokens; None for all.
    """

    latents: MlaSpec
    inputs: FusedLinear
    queries: FusedLinear | None
    query_norm: NormDescription
    latent_norm: NormDescription
    heads: FusedLinear
    o: FusedLinear
    rope: RopeSpec | None
    index: SparseIndexDescription | None = None

    def linears(self) -> Iterator[tuple[str, FusedLinear]]:
        """Yield its linear layers with their slots."""
        yield "latent_in", self.inputs
        if self.queries is not None:
            yield "latent_q", self.queries
        yield "o", self.o
        yield "latent_heads", self.heads
        if self.index is not None:
            yield from self.index.linears()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlockDescription:
    """A block before a layer's state, see `SharedBlockSpec`.

    Attributes:
        attention_norm: the norm of the concatenated hidden state and embedding.
        attention: the attention after it; `qkv_adapters` are the names of this layer's adapters
            of its projections.
        mlp_norm, mlp: the MLP after attention; `up_adapter` is the name of this layer's adapter.
        adapter_rank: the adapters' rank.
        output: the layer's own projection of the MLP's output.
        mixer_norm: the norm of the sum of residual and block, before the state.
    """

    attention_norm: NormDescription
    attention: AttentionDescription
    qkv_adapters: tuple[str, ...]
    mlp_norm: NormDescription
    mlp: MlpDescription
    up_adapter: str
    adapter_rank: int
    output: FusedLinear
    mixer_norm: NormDescription


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpDescription:
    """The parts of a layer with several hidden states beside attention and MLP; see
    `engine.models.layers.altup`.

    Attributes:
        output_scale: the name of a vector; "" for none.
        sparsity: the share of the MLP's gates that become 0.
    """

    input_norm: NormDescription
    router_norm: NormDescription
    router: FusedLinear
    prediction: FusedLinear
    correction: FusedLinear
    output_scale: str
    laurel_down: FusedLinear
    laurel_up: FusedLinear
    laurel_norm: NormDescription
    gate: FusedLinear
    projection: FusedLinear
    projection_norm: NormDescription
    sparsity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpModelDescription:
    """The parts of a model with several hidden states before the first layer and after the last.

    Attributes:
        table: the name of the layers' embeddings.
        projection: the projection from a token's embedding to what is added to these, after a norm
            by layer.
        expand, collapse: projections for each hidden state except the first, from the embedding to
            the state, and from the state to the result.
    """

    table: str
    projection: FusedLinear
    projection_norm: NormDescription
    expand: tuple[FusedLinear, ...]
    collapse: tuple[FusedLinear, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossDescription:
    """A layer's attention to an encoder's states.

    Attributes:
        norm: the norm before it.
        queries: the projection of the hidden state. kv: the projection of the encoder's states to
            keys, followed by values.
        output: the output projection.
    """

    norm: NormDescription
    queries: FusedLinear
    kv: FusedLinear
    output: FusedLinear


@dataclass(frozen=True, slots=True)
class MlpDescription:
    """up (rows of gate, then of up, if `gated`), the activation, down."""

    up: FusedLinear
    down: FusedLinear
    activation: ActivationSpec
    gated: bool


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """A mixture of experts.

    Attributes:
        router: hidden size to number of experts.
        moe: the experts' number, size and layout in the checkpoint.
        layer: the prefix of the layer's names; names in `moe` are relative to it.
        shared: the expert for every token; None for none.
        shared_gate: hidden size to 1, whose sigmoid is the shared expert's weight; None for 1.
    """

    router: FusedLinear
    moe: MoeSpec
    layer: str
    shared: MlpDescription | None = None
    shared_gate: FusedLinear | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDescription:
    """One layer.

    Attributes:
        wiring: see `engine.models.layers.decoder_layer`.
        input_norm: the norm before attention.
        attention: attention, multi-head latent attention or a recurrent state; None if the layer
            is only an MLP.
        state: a recurrent state beside attention; None for none.
        attention_out_norm, mlp_out_norm: norms of the outputs of attention and MLP before they are
            added to the residual.
        mlp_norm: the norm before the MLP or experts; None in a parallel layer where they have
            attention's input, or if the layer has only one of both.
        mlp: None if the layer has no MLP.
        residual_norm, residual_mlp: the MLP beside the experts of "residual_experts".
        shared: a block before the state, which then has the input's norms; None for none.
        altup: the parts of a layer with several hidden states, including the norm of the input;
            None for one hidden state.
        cross: attention to an encoder's states, before the MLP; None without an encoder.
    """

    wiring: Wiring
    input_norm: NormDescription
    attention: AttentionDescription | StateDescription | LatentDescription | None
    attention_out_norm: NormDescription
    mlp_norm: NormDescription | None
    mlp: MlpDescription | MoeBlock | None
    mlp_out_norm: NormDescription
    state: StateDescription | None = None
    residual_norm: NormDescription | None = None
    residual_mlp: MlpDescription | None = None
    shared: SharedBlockDescription | None = None
    altup: AltUpDescription | None = None
    cross: CrossDescription | None = None

    def attention_linears(self) -> Iterator[tuple[str, FusedLinear]]:
        """Yield the linear layers of attention and of the state with their slots."""
        for part in (self.attention, self.state):
            if part is not None:
                yield from part.linears()


def described_linears(description: object) -> Iterator[FusedLinear]:
    """Yield the linear layers of a description and of its parts, except routed experts."""
    if isinstance(description, FusedLinear):
        yield description
    elif is_dataclass(description):
        for part in fields(description):
            yield from described_linears(getattr(description, part.name))


@dataclass(frozen=True, slots=True)
class TableDescription:
    """A weight [vocab_size, hidden_size].

    `normalized`: whether its rows are scaled to length 1; `hidden`: tokens that are never
    generated.
    """

    name: str
    bias: bool = False
    normalized: bool = False
    hidden: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A whole decoder.

    Attributes:
        embedding: None if the head is also the embedding.
        positions: the name of the learned positions; "" for none.
        embedding_norm: the norm after the embedding.
        altup: the parts of a model with several hidden states; None for one.
    """

    embedding: TableDescription | None
    head: TableDescription
    positions: str
    embedding_norm: NormDescription
    layers: tuple[LayerDescription, ...]
    final_norm: NormDescription
    altup: AltUpModelDescription | None = None


def experts_of(experts: MoeBlock) -> Iterator[tuple[str, FusedLinear]]:
    """Yield each expert's linear layers with their slots, named as if they had separate tensors."""
    moe, hidden = experts.moe, experts.router.columns
    gate, up, down = moe.expert_names
    for index in range(moe.num_experts):
        prefix, inner = f"{experts.layer}{moe.experts}{index}.", moe.intermediate_size
        both = (LinearPart(f"{prefix}{gate}", inner), LinearPart(f"{prefix}{up}", inner))
        yield f"up.{index}", FusedLinear(parts=both, columns=hidden)
        yield (
            f"down.{index}",
            FusedLinear(parts=(LinearPart(f"{prefix}{down}", hidden),), columns=inner),
        )
