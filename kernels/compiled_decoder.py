"""The contract of a whole decode step in one call, around a `CompiledDecoder`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from kernels.layers import LinearLayer, MixtureOfExperts, MlpWeights, NormWeights
from kernels.lora import LayerLoras, LoraTable, TableSegment
from kernels.ssm import ScanWeights


class DecoderShape(Protocol):
    """The fields of a decoder's spec that all layers of a `CompiledDecoder` have in common.

    Attributes:
        attention_scale: of q.k; 0: 1 / sqrt(head_dim).
        activation, activation_limit, activation_alpha: see `ActivationSpec`.
        gated: MLPs multiply the activated half with another one.
        wiring: "sequential" or "parallel": attention and MLP both add to the residual that the
            layer began with.
        residual_scale: of what either adds.
        clip_qkv: queries, keys and values are clamped to +- this before rotation; 0: they aren't.
        round_attention: see `AttentionArgs.round_inputs`.
        attention_output_scale, mlp_output_scale: of their last products.
        mlp_gate_scale: of what the MLP activates.
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
    def mlp_gate_scale(self) -> float: ...
    @property
    def mlp_output_scale(self) -> float: ...


class DecoderLayer(Protocol):
    """One layer: norm, attention, norm, MLP or experts. Either half may be missing.

    Attributes:
        attention: `AttentionWeights` of a layer that has a cache; no other kind can be compiled.
        attention_out_norm, mlp_out_norm: norms of what attention and MLP give, before it is added
            to the residual.
        mlp_norm: None in a parallel layer: the MLP takes what attention takes.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayer:
    """Mamba 2 in one layer, in the place of attention or beside it; all tensors are float32 but
    `scan_states`.

    Attributes:
        inputs: hidden state to gate, values, keys, queries, rates of T tokens.
        input_scales: of these; None: 1.
        conv, conv_bias: [width, channels] and [channels], of values, keys and queries.
        scan: by head.
        norm: [values] of what the heads give, by key head; None: none.
        norm_before_gate: otherwise the norm comes after the gate.
        output: of that to the hidden state, times `output_scale`.
        key_heads: of keys and queries.
        conv_states, scan_states, scan_scales: by block, see `KernelSet.causal_conv` and
            `KernelSet.linear_scan`.
    """

    inputs: LinearLayer
    input_scales: Tensor | None
    conv: Tensor
    conv_bias: Tensor | None
    scan: ScanWeights
    norm: Tensor | None
    norm_before_gate: bool
    output: LinearLayer
    output_scale: float
    key_heads: int
    conv_states: Tensor
    scan_states: Tensor
    scan_scales: Tensor | None


#: Keys, values and their scales: see `rope_and_cache`.
KVCache = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class AuxStateBuffer(NamedTuple):
    """What some layers of a pass begin with, of each of its tokens.

    Attributes:
        layers: their numbers, ascending.
        states: float32 [T, len(layers) * H], gets it, side by side.
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
    ) -> Tensor:
        """Hidden states after the final norm, float32 [R, H].

        hidden float32 [T, H], contiguous: the embeddings; overwritten, by the residual behind the
        last layer where all tokens are wanted. rows int64 [R]: those wanted, all by default.
        `other_groups` are slot_mapping and block_tables of the groups 1, 2, ... `adapters` name the
        tokens that go through one, as for `KernelSet.add_lora`. `inputs` gets what some layers
        begin with, of all tokens. The rest is as for `rope_and_cache` and `paged_attention`.

        Raises ValueError for what doesn't fit together, and for layers with states, which run in
        whole steps alone.
        """

    def lora_table(self, layers: LayerLoras) -> LoraTable | None:
        """An adapter for this decoder; None where it changes what one call can't have changed."""
        return None

    def compile_step(
        self, ends: EmbeddingAndHead, tables: BatchTables, taps: Sequence[int] = ()
    ) -> CompiledStep | None:
        """Whole decode steps in one call each, where this set has that; else None. With `taps`,
        layers, they tell of what these begin with.

        They give what this decoder and the operations around it do, to the bit. The layers must be
        of this set. Raises ValueError for what doesn't fit together.
        """
        return None


@dataclass(frozen=True, slots=True)
class EmbeddingAndHead:
    """What a model has before its first layer and after its last.

    Attributes:
        embedding: rows [vocab, H] of tokens, times `embedding_scale`.
        positions: float32 [P, H], whose row `position + position_offset` is added; None: nothing.
        head: H to vocab; its logits are multiplied by `logit_scale`.
    """

    embedding: LinearLayer
    head: LinearLayer
    positions: Tensor | None = None
    position_offset: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class BatchTables:
    """The running batch, a row a sequence, as a step finds it and leaves it.

    Attributes:
        tokens: int32 [R, longest + 1], prompt and output.
        block_tables: int32 [R, blocks] by KV cache group; their lengths may differ.
        num_prompt, num_tokens, num_computed: int64 [R]; of the tokens, those that came with the
            request, all, and those whose KV is there.
        rope_offsets: int64 [R]; what is added to a token's position for its rotation.
        state_blocks: int32 [R, 1], where layers' states are; None: no layer has any.
        state_tokens: int64 by block of states, the tokens that it has taken in; -1 while a step is
            under way.
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
    """What is done to a sequence's logits before a token is chosen, in this order; ids are those of
    the vocabulary.

    Attributes:
        allowed: int32 [words], bit t % 32 of word t // 32 set where token t may come; None: all.
        forbidden: tokens that never come.
        words: two tokens or more each; the last never comes behind the others in the output.
        ends: tokens that don't come before there are `min_tokens`.
        bias: what is added, by token.
        repetition, frequency, presence: penalties, as in `kernels.logit_edits.PenaltyRows`.
        counts_prompt: whether the prompt's tokens are repeated, too.
        num_logprobs: log probabilities of the untouched logits, of the chosen token and of so many
            of the likeliest; -1: none.
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
    """Log probabilities by token of a step, of the rows whose `LogitEditParams` ask for some: ids
    int64,
    values float32 and ranks int64, [tokens, 1 + the most that any row asks for]. The chosen token
    first, then the likeliest; of a row that asks for fewer what is beyond them means nothing.
    """

    ids: Tensor
    values: Tensor
    ranks: Tensor


@dataclass(frozen=True, slots=True)
class StepSamplingParams:
    """How each sequence of a step chooses, as `KernelSet.sample` takes it; [n] each.

    `seeds` int64 hold unsigned 64-bit numbers: with the count of tokens generated so far, they give
    the random numbers of `engine.sampling.topk_topp`. `edits`: none, or one a sequence.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    edits: Sequence[LogitEditParams] = ()


class BoundStep(ABC):
    """Steps of the same sequences, as `CompiledStep.bind` bound them.

    Attributes:
        scores: log probabilities of the last step, where any row's edits ask for some. A row's
            tokens lie behind each other, its own first and then one for each draft.
    """

    scores: StepLogprobs | None = None

    @abstractmethod
    def __call__(
        self,
        drafts: Sequence[int] | None = None,
        logits: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> list[list[int]]:
        """Run a step. Returns the tokens of each row that it chooses for: one more than its drafts
        that are accepted, none where the logits of the first are no numbers to choose by.

        Args:
            drafts: number of drafts of each row, which lie behind its newest token in the tables;
                None: no row has any. They are computed in the same step, and accepted as far as
                they are what is chosen.
            logits: float32 [tokens of the rows without a choice, vocab], gets theirs; None without
                drafts: those of `bind` do. Of these rows' counts only that of computed tokens
                advances, by all of them.
            hidden: float32 [tokens of all rows, H], gets what the head took; where the step was
                made with taps, [.., taps * H], what those layers began with, side by side.

        Raises ValueError, and changes nothing, where a row doesn't decode: its tokens but one are
        computed, and there is room in the tables for one more behind its drafts.
        """


class CompiledStep(ABC):
    """Steps over some tables."""

    @abstractmethod
    def bind(
        self,
        rows: Tensor,
        choice: StepSamplingParams | None,
        logits: Tensor | None = None,
        adapters: Sequence[TableSegment] = (),
    ) -> BoundStep:
        """What runs steps of the sequences in `rows`, int64 [n], as often as it is asked.

        Of the last m rows no token is chosen: `logits`, float32 [m, vocab], gets their logits, and
        the caller chooses, writes the token and counts it. None: m is 0. For the n - m others,
        choice None means that each takes its likeliest token. Tokens and counts are moved on in
        the tables. `adapters` name places in `rows`, as for `KernelSet.add_lora`.
        """
