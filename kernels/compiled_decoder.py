"""The interface of a `CompiledDecoder` and of a `CompiledStep`, a whole decode step in one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from kernels.layers import (
    AttentionWeights,
    LinearLayer,
    MixtureOfExperts,
    MlpWeights,
    NormWeights,
    PerHeadLinear,
)
from kernels.lora import LayerLoras, LoraTable, PackedLora, TableSegment
from kernels.ssm import ScanWeights, StateRows


class DecoderShape(Protocol):
    """The properties that all layers of a `CompiledDecoder` share.

    Attributes:
        attention_scale: the factor of q.k; 0 for 1 / sqrt(head_dim).
        activation, activation_limit, activation_alpha: see `ActivationSpec`.
        gated: whether MLPs multiply the activated half with another half.
        wiring: "sequential", or "parallel" if attention and MLP have the same input.
        residual_scale: the factor of what attention and MLP add to the residual.
        clip_qkv: clamps queries, keys and values to +- this before rotation; 0 for no limit.
        round_attention: see `AttentionArgs.round_inputs`.
        attention_output_scale, mlp_output_scale: factors of their output projections.
        mlp_gate_scale: the factor of the MLP's gate before the activation.
        attention_output_gate: whether each head's query is followed by a gate, whose sigmoid
            multiplies the head's output.
        normed_residual: if what a norm gives becomes the residual, its factors before attention,
            before a state and before the MLP; otherwise ().
    """

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def attention_scale(self) -> float: ...
    @property
    def attention_soft_cap(self) -> float: ...
    @property
    def rope_neox(self) -> bool: ...
    @property
    def activation(self) -> str: ...
    @property
    def activation_limit(self) -> float: ...
    @property
    def activation_alpha(self) -> float: ...
    @property
    def gated(self) -> bool: ...
    @property
    def wiring(self) -> str: ...
    @property
    def residual_scale(self) -> float: ...
    @property
    def clip_qkv(self) -> float: ...
    @property
    def round_attention(self) -> bool: ...
    @property
    def attention_output_scale(self) -> float: ...
    @property
    def attention_output_gate(self) -> bool: ...
    @property
    def mlp_gate_scale(self) -> float: ...
    @property
    def mlp_output_scale(self) -> float: ...
    @property
    def normed_residual(self) -> Sequence[float]: ...


class DecoderLayer(Protocol):
    """A layer: norm, attention, norm, MLP or experts. Either half may be missing.

    Attributes:
        attention: `AttentionWeights` of a layer with a cache, or a `LatentLayer` beside it.
        attention_out_norm, mlp_out_norm: norms of the outputs of attention and MLP before they are
        added to the residual.
        mlp_norm: None in a parallel layer, where the MLP has attention's input.
        mlp, experts: one of the two, or neither.
    """

    @property
    def input_norm(self) -> NormWeights: ...
    @property
    def attention(self) -> object: ...
    @property
    def attention_out_norm(self) -> NormWeights: ...
    @property
    def mlp_norm(self) -> NormWeights | None: ...
    @property
    def mlp(self) -> MlpWeights | None: ...
    @property
    def experts(self) -> MixtureOfExperts | None: ...
    @property
    def mlp_out_norm(self) -> NormWeights: ...


class LruGates(Protocol):
    """The gates and decays of a real-gated linear recurrent unit, see `KernelSet.lru_inputs`.

    Attributes:
        gates: each head's projection to its input gates, followed by its recurrence gates.
        gate_biases: float32 [heads, 2 * value_size].
        decay: float32 [values].
    """

    @property
    def gates(self) -> PerHeadLinear: ...
    @property
    def gate_biases(self) -> Tensor: ...
    @property
    def decay(self) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayer:
    """Attention over latents, whose cache has one vector per token: the rotated key, followed by
    the latent. Norms are RMS.

    Attributes:
        inputs: the projection of the hidden state to the queries or their latent, to the latent and
            to the key that is rotated.
        queries, query_norm: the projection from the queries' latent, and the norm before it; None
            without such a latent. The last values of a query are rotated.
        latent_norm: float32 [latent].
        into: each head's projection from the unrotated part of its query to the latents' space.
        out_of: each head's projection from weighted sums of latents to values.
        output: the output projection.
        cos_sin: the rotary table; None for no rotation.
        rotary: the number of rotated values.
        eps: the epsilon of both norms.
    """

    inputs: LinearLayer
    queries: LinearLayer | None
    query_norm: Tensor | None
    latent_norm: Tensor
    into: PerHeadLinear
    out_of: PerHeadLinear
    output: LinearLayer
    cos_sin: Tensor | None
    rotary: int
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayer:
    """A layer with a recurrent state, instead of attention or beside it. All tensors except
    `scan_states` are float32.

    Attributes:
        kind: "mamba2"; "mamba1", whose heads have one value each; "delta", the gated delta rule;
            "conv", a short convolution between two gates; "lightning", linear attention; "kda",
            Kimi delta attention; "rg_lru", the real-gated linear recurrent unit.
        inputs: the projection of the hidden state: "mamba2": to gate, values, keys, queries and
            rates; "mamba1": to values and gate; "delta": by key head to query, key, values and
            gates of its heads; "conv": to the gates before and after the convolution, and values;
            "lightning": by head to query, key and values, then to the gates; "kda": to queries,
            keys, values, the inputs of `rates` and of `gates`, and betas; "rg_lru": to values and
            gate.
        input_scales: factors of its outputs; None for 1.
        selection: "mamba1": the projection of the convolution's result to the inputs of `rates`,
            keys and queries, which `selection_norms` norm; otherwise None and ().
        rates: the projection to rates in "mamba1" and "kda", to each key head's betas and rates in
            "delta".
        gates: the projection to gates in "kda".
        lru: the gates and decays of "rg_lru".
        conv, conv_bias: [width, channels] and [channels]. The channels are values, keys and queries
            ("mamba2"), queries, keys and values ("delta"), or values.
        scan: the scan's parameters by head; None for "conv" and "rg_lru".
        norm: the norm of the heads' outputs: [values], in groups by key head in "mamba2", or
            [value_size] ("delta", "kda"); or None. `eps` is its epsilon.
        norm_before_gate: whether the norm precedes the gate.
        output: the output projection, multiplied by `output_scale`.
        key_heads: number of heads of keys and queries.
        conv_states, scan_states, scan_scales: by block, see `KernelSet.causal_conv` and
            `KernelSet.linear_scan`.
    """

    kind: str
    inputs: LinearLayer
    input_scales: Tensor | None = None
    selection: LinearLayer | None = None
    selection_norms: Sequence[NormWeights] = ()
    rates: LinearLayer | None = None
    gates: LinearLayer | None = None
    lru: LruGates | None = None
    conv: Tensor
    conv_bias: Tensor | None
    scan: ScanWeights | None
    norm: Tensor | None
    eps: float
    norm_before_gate: bool
    output: LinearLayer
    output_scale: float
    key_heads: int
    conv_states: Tensor
    scan_states: Tensor
    scan_scales: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlock:
    """A block before a layer's state, whose weights several layers may share. The state's input is

        mixer_norm(residual + output(mlp(mlp_norm(attention(attention_norm(both))))))

    where `both` is the residual beside the embedding. The layer's cache is the block's.

    Attributes:
        qkv_added, up_added: this layer's own additions to the projections; None for none.
    """

    attention_norm: NormWeights
    attention: AttentionWeights
    mlp_norm: NormWeights
    mlp: MlpWeights
    output: LinearLayer
    mixer_norm: NormWeights
    qkv_added: PackedLora | None
    up_added: PackedLora | None


#: Keys, values and their scales: see `rope_and_cache`.
KVCache = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class AuxStateBuffer(NamedTuple):
    """A buffer for the inputs of some layers, for all tokens of a pass.

    Attributes:
        layers: indices of the layers, ascending.
        states: float32 [T, len(layers) * H], receives the layers' inputs side by side.
    """

    layers: Sequence[int]
    states: Tensor


class CompiledDecoder(ABC):
    """All layers of a decoder and its final norm in one call."""

    @abstractmethod
    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        rows: Tensor | None = None,
        other_groups: Sequence[tuple[Tensor, Tensor]] = (),
        adapters: Sequence[TableSegment] = (),
        inputs: AuxStateBuffer | None = None,
        states: StateRows | None = None,
    ) -> Tensor:
        """Return hidden states after the final norm, float32 [R, H].

        hidden float32 [T, H], contiguous, contains the embeddings. It is overwritten, with the
        residual after the last layer if all rows are returned. rows int64 [R] are the rows to
        return, by default all. `other_groups` are slot_mapping and block_tables of the KV cache
        groups 1, 2, ... `adapters` lists the tokens with adapters, as for `KernelSet.add_lora`.
        `inputs` receives the inputs of some layers. `states` are the blocks of layers with states,
        which other stages may have; None without any. The other arguments are those of
        `rope_and_cache` and `paged_attention`.

        Raises ValueError for inconsistent arguments.
        """

    def lora_table(self, layers: LayerLoras) -> LoraTable | None:
        """Return an adapter for this decoder; None if it changes layers that aren't supported."""
        return None

    def compile_step(
        self, ends: EmbeddingAndHead, tables: BatchTables, taps: Sequence[int] = ()
    ) -> CompiledStep | None:
        """Return steps that run in one call each; None if this set has none. With `taps`, a step
        returns the inputs of these layers.

        Their results equal those of this decoder and the operations around it bitwise. The layers
        must belong to this set. Raises ValueError for inconsistent arguments.
        """
        return None


@dataclass(frozen=True, slots=True)
class EmbeddingAndHead:
    """A model's embedding and output layer.

    Attributes:
        embedding: [vocab, H], multiplied by `embedding_scale`.
        positions: float32 [P, H], whose row `position + position_offset` is added; or None.
        head: the output layer from H to vocab; its logits are multiplied by `logit_scale`.
    """

    embedding: LinearLayer
    head: LinearLayer
    positions: Tensor | None = None
    position_offset: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class BatchTables:
    """The running batch with a row per sequence, which a step reads and updates.

    Attributes:
        tokens: int32 [R, max_model_len + 1], prompt and output.
        block_tables: int32 [R, blocks] by KV cache group; their widths may differ.
        num_prompt, num_tokens, num_computed: int64 [R], numbers of prompt tokens, of all tokens,
        and of tokens with cached KV.
        rope_offsets: int64 [R], added to positions for rotary embedding.
        state_blocks: int32 [R, 1], the blocks of layers' states; None without states.
        state_tokens: int64 by state block, the number of tokens in the state; -1 during a step.
    """

    tokens: Tensor
    block_tables: Sequence[Tensor]
    num_prompt: Tensor
    num_tokens: Tensor
    num_computed: Tensor
    rope_offsets: Tensor
    state_blocks: Tensor | None = None
    state_tokens: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEditParams:
    """Changes of a sequence's logits before a token is chosen, applied in this order.

    Attributes:
        allowed: int32 [words], bit t % 32 of word t // 32 is set if token t is allowed; None for
        all.
        forbidden: tokens that are never chosen.
        words: sequences of two or more tokens; the last never follows the others in the output.
        ends: tokens that aren't chosen before `min_tokens` are generated.
        bias: added to the logits, by token.
        repetition, frequency, presence: penalties, as in `kernels.logit_edits.PenaltyRows`.
        counts_prompt: whether the prompt's tokens count as repeated.
        num_logprobs: number of most likely tokens whose log probabilities by the unchanged logits
        are returned beside the chosen token's; -1 for none at all.
    """

    allowed: Tensor | None = None
    forbidden: Sequence[int] = ()
    words: Sequence[Sequence[int]] = ()
    ends: Sequence[int] = ()
    min_tokens: int = 0
    bias: Mapping[int, float] = field(default_factory=dict)
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    counts_prompt: bool = True
    num_logprobs: int = -1


class StepLogprobs(NamedTuple):
    """Log probabilities of a step's tokens, for rows whose `LogitEditParams` request them.

    ids int64, values float32 and ranks int64 are [tokens, 1 + the maximum `num_logprobs`]: the
    chosen token, then the most likely ones. Values beyond a row's `num_logprobs` are undefined.
    """

    ids: Tensor
    values: Tensor
    ranks: Tensor


@dataclass(frozen=True, slots=True)
class StepSamplingParams:
    """The sampling parameters of a step's sequences, as for `KernelSet.sample`; [n] each.

    `seeds` int64 contains unsigned 64-bit seeds. Together with the number of generated tokens they
    determine the random numbers of `engine.sampling.uniforms`. `edits` is empty or has an item per
    sequence.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    edits: Sequence[LogitEditParams] = ()


class BoundStep(ABC):
    """Steps of the same sequences, bound by `CompiledStep.bind`.

    Attributes:
        scores: log probabilities of the last step, if any row requests them. Each row has its
        next token, followed by one for each draft.
    """

    scores: StepLogprobs | None = None

    @abstractmethod
    def __call__(
        self,
        drafts: Sequence[int] | None = None,
        logits: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> list[list[int]]:
        """Run a step. Returns the new tokens of each row with a choice: one more than its accepted
        drafts, or none if the first logits aren't finite numbers.

        Args:
            drafts: number of draft tokens of each row, which follow its newest token in the tables;
            None if there are none. They are computed in the same step, and accepted as long as
            they equal the chosen tokens.
            logits: float32 [tokens of rows without a choice, vocab], receives their logits; None
            without drafts, when those of `bind` are used. For these rows only the number of
            computed tokens is advanced, by all of their tokens.
            hidden: float32 [tokens of all rows, H], receives the output layer's inputs; for a step
            with taps, [.., taps * H], the inputs of those layers side by side.

        Raises ValueError without changing anything unless every row decodes: all of its tokens
        but one are computed, and the tables have room for one more after its drafts.
        """


class CompiledStep(ABC):
    """Steps over a batch's tables."""

    @abstractmethod
    def bind(
        self,
        rows: Tensor,
        choice: StepSamplingParams | None,
        logits: Tensor | None = None,
        adapters: Sequence[TableSegment] = (),
    ) -> BoundStep:
        """Return steps of the sequences in `rows`, int64 [n], which can be run repeatedly.

        For the last m rows no token is chosen: `logits`, float32 [m, vocab], receives their
        logits, and the caller chooses, writes and counts the token. If `logits` is None, m is 0.
        The n - m other rows choose by `choice`, or the most likely token if that is None; their
        tokens and counts are updated in the tables. `adapters` lists indices in `rows`, as for
        `KernelSet.add_lora`.
        """
