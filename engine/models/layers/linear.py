"""Descriptions of a model's norms, linear layers and tables, by their names in the checkpoint.

`engine.models.layers.decoder_layer` makes it from a `DecoderSpec`; weights are loaded by it, and
whatever must
know a layer by its name (a rank's share, an adapter, a quantised checkpoint) finds it here.
Sizes are in elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Literal

from torch import Tensor

from engine.models.decoder_spec import MambaSpec, MlaSpec, MoeSpec, QKNorm
from engine.models.rotary_embedding import RopeSpec
from kernels import LinearLayer
from kernels.attention import BlockSparse
from kernels.interface import (
    NO_NORM,
    ActivationSpec,
    AttentionWeights,
    MixtureOfExperts,
    MlpWeights,
    NormWeights,
    PerHeadLinear,
    ScanWeights,
)

Split = Literal["", "rows", "columns"]
RowOrder = Literal["", "grouped", "repeated", "interleaved"]
Wiring = Literal["sequential", "parallel", "post", "residual_experts"]


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One of the checkpoint's weights within a linear layer.

    Attributes:
        name: in the checkpoint, without `.weight`.
        rows: outputs.
        has_bias: where the layer has biases, whether this part has one; else it is 0.
    """

    name: str
    rows: int
    has_bias: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLinear:
    """A linear layer: its parts over each other, [rows, columns].

    Attributes:
        parts: in order; several are fused into one product.
        columns: inputs.
        bias: whether each part has one.
        split: how ranks would share it: "rows" (each computes some outputs), "columns" (each takes
            some inputs, and the results are added up), "": each holds all of it.
        order: of the checkpoint's rows. "grouped": by KV head its queries, its key, its value;
            "repeated": keys and values of fewer heads than the cache has; "interleaved": both
            halves of a gated MLP in turns.
        quantized: whether a quantisation scheme applies to it.
    """

    parts: tuple[LinearPart, ...]
    columns: int
    bias: bool = False
    split: Split = ""
    order: RowOrder = ""
    quantized: bool = True

    @property
    def rows(self) -> int:
        """Outputs, as the checkpoint has them."""
        return sum(part.rows for part in self.parts)


@dataclass(frozen=True, slots=True)
class NormDescription:
    """A norm over `size` values; `name` "": there is none, x stays as it is."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionDescription:
    """Attention of one layer.

    Attributes:
        qkv, o: the projections before and after.
        qk_norm: how queries and keys are normed, by the weights called q_norm and k_norm.
        kv_heads: KV heads that the checkpoint has.
        rope: None: no rotation.
        window: in tokens; 0: all of them.
        sinks: name of each head's learned logit; "": none.
        sparse: blocks of tokens that are seen; None: all.
        keeps_keys: otherwise `qkv` gives queries alone, and keys and values are another layer's.
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
        """Its linear layers, by their slots."""
        yield "qkv", self.qkv
        yield "o", self.o


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDescription:
    """What carries a state in the place of attention. Names are the checkpoint's.

    Attributes:
        state: its sizes.
        inputs, output: the products before and after; "lightning": `inputs` gives gates, too.
        selection: of the convolution's result, what rates are made of, keys, queries; or None.
        rates: the product that gives rates, or None.
        gates: the product that gives gates, of what `inputs` gives, or None.
        conv: of the convolution, or of those of parts of its channels, [channels, 1, width]; ():
            its weights are 1.
        decay, rate_bias, skip: vectors, a value a head ("mamba1": a decay for each of its keys);
            "" where there are none.
        fixed_decays: of the heads, in the place of `decay`; (): it has a name.
        norm: of what the heads give, if there are any.
        selection_norms: of the parts of `selection`; (): it is None.
        head_gates: of the products that give each head's gates, without `_weight` and `_bias`; ():
            there are none.
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
        """Its linear layers, by their slots."""
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

    def linears(self) -> Iterator[FusedLinear]:
        """Its linear layers."""
        yield from (self.queries, self.keys, self.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDescription:
    """Attention over latents.

    Attributes:
        latents: its sizes.
        inputs: queries, or their latent; then the latent and what is rotated.
        queries: of their latent; None: the first product gives them.
        query_norm, latent_norm: of latents.
        heads: of each head its keys over its values, of the latent. It is taken into the queries
            and behind the results, and no product of its own.
        o: the projection after attention.
        rope: None: no rotation.
        index: what chooses tokens; None: nothing does.
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
        """Its linear layers, by their slots."""
        yield "latent_in", self.inputs
        if self.queries is not None:
            yield "latent_q", self.queries
        yield "o", self.o
        yield "latent_heads", self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlockDescription:
    """A block before a layer's state, see `SharedBlockSpec`.

    Attributes:
        attention_norm: of the hidden state beside the embedding.
        attention: of that; `qkv_adapters` are the names of what this layer adds to its products.
        mlp_norm, mlp: of what attention gives; `up_adapter` is the name of what this layer adds.
        adapter_rank: of what is added.
        output: the layer's own product of what the MLP gives.
        mixer_norm: of the residual and the block's result, before the state.
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

    def linears(self) -> Iterator[FusedLinear]:
        """Its linear layers, the low ranks left out."""
        yield from (self.attention.qkv, self.attention.o, self.mlp.up, self.mlp.down, self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpDescription:
    """What a layer with several hidden states has beside attention and MLP; see
    `engine.models.layers.altup`.

    Attributes:
        output_scale: name of a vector; "": there is none.
        sparsity: of the MLP's gates.
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

    def linears(self) -> Iterator[FusedLinear]:
        """Its linear layers."""
        yield from (self.router, self.prediction, self.correction)
        yield from (self.laurel_down, self.laurel_up, self.gate, self.projection)


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpModelDescription:
    """What a model with several hidden states has before its first layer and after its last.

    Attributes:
        table: name of the layers' embeddings.
        projection: of a token's embedding to what is added to them, normed by layer.
        expand, collapse: of each hidden state but the first, from the embedding, and to the result.
    """

    table: str
    projection: FusedLinear
    projection_norm: NormDescription
    expand: tuple[FusedLinear, ...]
    collapse: tuple[FusedLinear, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossDescription:
    """Attention of one layer to an encoder's states.

    Attributes:
        norm: before it.
        queries: of the hidden state. kv: keys over values, of the encoder's states.
        output: the projection after it.
    """

    norm: NormDescription
    queries: FusedLinear
    kv: FusedLinear
    output: FusedLinear


@dataclass(frozen=True, slots=True)
class MlpDescription:
    """up (gate over up, where it is gated), the activation, down."""

    up: FusedLinear
    down: FusedLinear
    activation: ActivationSpec
    gated: bool


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """A mixture of experts.

    Attributes:
        router: hidden size to number of experts.
        moe: how many, of what size, and how the checkpoint keeps them.
        layer: prefix of the layer's names, to which those in `moe` are relative.
        shared: the expert that every token goes through; None: there is none.
        shared_gate: hidden size to 1, whose sigmoid weighs it.
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
        input_norm: before attention.
        attention: what lets tokens meet: attention, maybe over latents, or a state that is carried;
            None: the layer is an MLP alone.
        state: a state that is carried beside attention; None: none is.
        attention_out_norm, mlp_out_norm: of what attention and MLP give, before it is added.
        mlp_norm: before the MLP or the experts; None in a parallel layer: they take what attention
            takes, or there is one norm.
        mlp: None: the layer has none.
        residual_norm, residual_mlp: the MLP beside the experts of "residual_experts".
        shared: a block before the state, which has the norm then; None: there is none.
        altup: what a layer with several hidden states has, the input's norm among it; None: there
            is one.
        cross: attention to an encoder's states, before the MLP; None: there is no encoder.
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
        """The linear layers of attention and of the state, by their slots."""
        for part in (self.attention, self.state):
            if part is not None:
                yield from part.linears()

    def linears(self) -> Iterator[FusedLinear]:
        """Its linear layers, but for the experts that tokens are sent to."""
        yield from (linear for _, linear in self.attention_linears())
        if isinstance(self.attention, LatentDescription) and self.attention.index is not None:
            yield from self.attention.index.linears()
        if self.shared is not None:
            yield from self.shared.linears()
        if self.altup is not None:
            yield from self.altup.linears()
        if self.cross is not None:
            yield from (self.cross.queries, self.cross.kv, self.cross.output)
        if isinstance(self.mlp, MoeBlock):
            yield self.mlp.router
            if self.mlp.shared_gate is not None:
                yield self.mlp.shared_gate
            mlps = (self.mlp.shared, self.residual_mlp)
        else:
            mlps = (self.mlp, self.residual_mlp)
        for mlp in mlps:
            if mlp is not None:
                yield mlp.up
                yield mlp.down


@dataclass(frozen=True, slots=True)
class TableDescription:
    """A weight of [vocab_size, hidden_size].

    `normalized`: its rows are brought to length 1; `hidden`: tokens that never come.
    """

    name: str
    bias: bool = False
    normalized: bool = False
    hidden: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A whole decoder.

    Attributes:
        embedding: None: the head serves as the embedding, too.
        positions: name of the learned positions; "": none.
        embedding_norm: after the embedding.
        altup: of a model with several hidden states; None: there is one.
    """

    embedding: TableDescription | None
    head: TableDescription
    positions: str
    embedding_norm: NormDescription
    layers: tuple[LayerDescription, ...]
    final_norm: NormDescription
    altup: AltUpModelDescription | None = None


def experts_of(experts: MoeBlock) -> Iterator[tuple[str, FusedLinear]]:
    """Each expert's, by names of its own whichever way a checkpoint keeps them."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LruWeights:
    """What a real-gated linear recurrent unit has learned.

    Attributes:
        gates: of each head's channels, the input gates over the recurrence gates.
        gate_biases: float32 [heads, 2 * value_size].
        decay: float32 [values], the logarithm of the decay where the recurrence gate is 1.
    """

    gates: PerHeadLinear
    gate_biases: Tensor
    decay: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateWeights:
    """See `StateDescription`. `conv` [width, channels] and what follows are float32.

    Attributes:
        input_scales: of the first product's outputs; None: 1.
        lru: of "rg_lru", which has no `scan`.
    """

    state: MambaSpec
    inputs: LinearLayer
    selection: LinearLayer | None
    rates: LinearLayer | None
    gates: LinearLayer | None
    output: LinearLayer
    conv: Tensor
    conv_bias: Tensor | None
    scan: ScanWeights | None
    norm: Tensor | None
    input_scales: Tensor | None
    selection_norms: tuple[NormWeights, ...]
    lru: LruWeights | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over one token reads."""
        head_gates = None if self.lru is None else self.lru.gates
        parts = (self.inputs, self.selection, self.rates, self.gates, head_gates, self.output)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseIndexWeights:
    """See `SparseIndexDescription`; the norm's tensors are float32 [head_dim]."""

    queries: LinearLayer
    keys: LinearLayer
    key_norm: Tensor
    key_norm_bias: Tensor
    weights: LinearLayer

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over one token reads."""
        return self.queries.nbytes + self.keys.nbytes + self.weights.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    """See `LatentDescription`; norms are float32.

    Attributes:
        into: of each head, from what isn't rotated of its query to what meets latents.
        out_of: of each head, from the latents' weighted sum to that of its values.
    """

    latents: MlaSpec
    inputs: LinearLayer
    queries: LinearLayer | None
    query_norm: Tensor | None
    latent_norm: Tensor
    into: PerHeadLinear
    out_of: PerHeadLinear
    o: LinearLayer
    cos_sin: Tensor | None
    index: SparseIndexWeights | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over one token reads."""
        parts = (self.inputs, self.queries, self.into, self.out_of, self.o, self.index)
        return sum(part.nbytes for part in parts if part is not None)


TokenMixerWeights = AttentionWeights | StateWeights | LatentWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlockWeights:
    """See `SharedBlockDescription`; layers with the same block share its tensors."""

    attention_norm: NormWeights
    attention: AttentionWeights
    mlp_norm: NormWeights
    mlp: MlpWeights
    output: LinearLayer
    mixer_norm: NormWeights

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over one token reads."""
        return self.attention.nbytes + self.mlp.nbytes + self.output.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpWeights:
    """See `AltUpDescription`; `output_scale` is float32 [hidden] or None."""

    input_norm: NormWeights
    router_norm: NormWeights
    router: LinearLayer
    prediction: LinearLayer
    correction: LinearLayer
    output_scale: Tensor | None
    laurel_down: LinearLayer
    laurel_up: LinearLayer
    laurel_norm: NormWeights
    gate: LinearLayer
    projection: LinearLayer
    projection_norm: NormWeights
    sparsity: float

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over one token reads."""
        products = (
            self.router, self.prediction, self.correction, self.laurel_down, self.laurel_up,
            self.gate, self.projection,
        )  # fmt: skip
        return sum(product.nbytes for product in products)


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpModelWeights:
    """See `AltUpModelDescription`; `table` has the layers' embeddings as its rows."""

    table: LinearLayer
    projection: LinearLayer
    projection_norm: NormWeights
    expand: tuple[LinearLayer, ...]
    collapse: tuple[LinearLayer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossWeights:
    """See `CrossDescription`."""

    norm: NormWeights
    queries: LinearLayer
    kv: LinearLayer
    output: LinearLayer

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over one token reads: keys and values are computed once."""
        return self.queries.nbytes + self.output.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """See `LayerDescription`: what layers that run one by one and compiled ones are made of.

    It has an `mlp` or `experts`, or neither.
    """

    wiring: Wiring
    input_norm: NormWeights
    attention: TokenMixerWeights | None
    attention_out_norm: NormWeights = NO_NORM
    state: StateWeights | None = None
    mlp_norm: NormWeights | None
    mlp: MlpWeights | None = None
    experts: MixtureOfExperts | None = None
    mlp_out_norm: NormWeights = NO_NORM
    residual_norm: NormWeights = NO_NORM
    residual_mlp: MlpWeights | None = None
    shared: SharedBlockWeights | None = None
    altup: AltUpWeights | None = None
    cross: CrossWeights | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a pass over one token reads."""
        blocks = (
            self.attention, self.state, self.mlp, self.experts, self.residual_mlp, self.shared,
            self.altup, self.cross,
        )  # fmt: skip
        return sum(block.nbytes for block in blocks if block is not None)


def named_tensors(weights: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of some weights, by the names of their fields behind `name`."""
    if isinstance(weights, Tensor):
        yield name, weights
    elif isinstance(weights, LinearLayer | MixtureOfExperts | PerHeadLinear):
        for part, tensor in weights.tensors().items():
            yield f"{name}.{part}", tensor
    elif isinstance(weights, tuple):
        for number, part in enumerate(weights):
            yield from named_tensors(part, f"{name}.{number}")
    elif is_dataclass(weights):
        for field in fields(weights):
            yield from named_tensors(getattr(weights, field.name), f"{name}.{field.name}")
