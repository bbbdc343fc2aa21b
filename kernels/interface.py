"""The contract of the kernels: what each function takes, gives and changes.

T is the number of tokens of a step, H the hidden size, D the size of a head, Hq and Hk the number
of query and of key/value heads (Hq is a multiple of Hk). Activations are float32, bfloat16 or
float16; what matters for accuracy (norms, softmax, sums) is computed in float32. Wrong shapes,
dtypes, positions, slots or block ids raise ValueError before anything is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.logits import LogitEdits
from kernels.quantization import check_integer_groups, check_integers, stacked


class LinearLayer(ABC):
    """y = x W^T + b with W [N, K] in whatever layout the implementation likes best."""

    in_features: int
    out_features: int
    nbytes: int
    """Bytes that one pass over the weight reads."""

    @abstractmethod
    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [M, K] -> [M, N] in x's dtype. Rows may be strided; `out` must be contiguous."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """float32 [T, K]: the rows ids int64 [T] of W.

        With this a tied output layer serves as the embedding too, and is kept once.
        """


PIECE_ROWS = 32
"""Pieces of a weight hold a multiple of so many of its rows."""


@dataclass(frozen=True, slots=True)
class Integers:
    """Rows of weights that are quantised already.

    values int8 [N, K], scales and minima [N, K / group]. Of 8 bits: weight = scale * value, with
    values in [-127, 127]. Of 4 bits: scale * (value - 8), or with minima scale * value - minimum,
    with values in [0, 15].
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None = None


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A norm: "rms" (with a weight), "layer" (with what it has of both), or "none".

    weight and bias are float32 [width].
    """

    kind: str = "none"
    weight: Tensor | None = None
    bias: Tensor | None = None


NO_NORM = NormWeights()


@dataclass(frozen=True, slots=True)
class HeadNormWeights:
    """LayerNorm of each head: weight float32 [heads or 1, D], bias [D] or None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """What an MLP does between its products.

    Attributes:
        name: "silu", "gelu", "gelu_tanh", "relu", "relu2", or "swiglu_clamped", which is gated:
            both halves are clamped to `limit`, the first one's sigmoid takes `alpha` times it, and
            the second one counts from 1.
    """

    name: str = "silu"
    limit: float = 0.0
    alpha: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """A mixture of gated experts.

    Attributes:
        router: [T, H] -> [T, experts].
        gate_up, down: of each expert.
        softmax_first: softmax over all experts, then choose `top_k`; or over the chosen ones only.
        renormalize: with `softmax_first`, divide by the sum of the chosen ones' weights.
        shared_gate_up, shared_down: an expert that every token goes through.
        shared_gate: [T, H] -> [T, 1], whose sigmoid weighs it.
    """

    router: LinearLayer
    gate_up: Sequence[LinearLayer]
    down: Sequence[LinearLayer]
    top_k: int
    softmax_first: bool
    renormalize: bool
    activation: ActivationSpec
    shared_gate_up: LinearLayer | None = None
    shared_down: LinearLayer | None = None
    shared_gate: LinearLayer | None = None


class CompiledExperts(ABC):
    """A mixture of experts in one call."""

    nbytes: int
    """Bytes that a pass over one token reads."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """float32 [T, H] -> [T, H]: the weighted sum of what the chosen experts give.

        A token's result doesn't depend on the others.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """What all layers of a `CompiledDecoder` have in common.

    Attributes:
        activation, activation_limit, activation_alpha: see `ActivationSpec`.
        gated: MLPs multiply the activated half with another one.
        parallel: attention and MLP both add to the residual that the layer began with.
        residual_scale: of what either adds.
        clip_qkv: queries, keys and values are clamped to +- this before rotation; 0: they aren't.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    scale: float
    soft_cap: float = 0.0
    neox: bool = True
    activation: str = "silu"
    activation_limit: float = 0.0
    activation_alpha: float = 0.0
    gated: bool = True
    parallel: bool = False
    residual_scale: float = 1.0
    clip_qkv: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayerWeights:
    """One layer: norm, attention, norm, MLP or experts.

    `attention_out_norm` and `mlp_out_norm` are norms of what attention and MLP give, before it is
    added to the residual; of a parallel layer `mlp_norm` may be none: the MLP then takes what
    attention takes. `sliding_window`, `alibi` and `sinks` are those of `paged_attention`. Queries
    and keys may be normed by head (`q_norm`, `k_norm`: RMS, float32 [D]; `q_head_norm`,
    `k_head_norm`: LayerNorm) or all heads together (`q_full_norm`, `k_full_norm`: RMS, float32
    [heads * D]). `group` says which slots and block tables are the layer's, where layers keep their
    tokens in different ones.
    """

    input_norm: NormWeights
    qkv: LinearLayer
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    q_full_norm: Tensor | None = None
    k_full_norm: Tensor | None = None
    q_head_norm: HeadNormWeights | None = None
    k_head_norm: HeadNormWeights | None = None
    cos_sin: Tensor | None
    key_cache: Tensor
    value_cache: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    sliding_window: int = 0
    alibi: Tensor | None = None
    sinks: Tensor | None = None
    o: LinearLayer
    attention_out_norm: NormWeights = NO_NORM
    mlp_norm: NormWeights
    gate_up: LinearLayer | None = None
    down: LinearLayer | None = None
    experts: CompiledExperts | None = None
    mlp_out_norm: NormWeights = NO_NORM
    group: int = 0


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
        others: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Tensor:
        """Hidden states after the final norm, float32 [R, H].

        hidden float32 [T, H], contiguous: the embeddings; overwritten. rows int64 [R]: the tokens
        that are wanted, all by default. `others` are slot_mapping and block_tables of the groups
        1, 2, ... The rest is as for `rope_and_cache` and `paged_attention`.
        """


class KernelSet(ABC):
    """One implementation of every operation."""

    name: str
    why: str
    device: torch.device = torch.device("cpu")
    """Where the operations want their tensors."""

    attention_backend: str = ""
    """What computes its attention, by its name in `kernels.attention`; "": its own."""
    fuses_experts: bool = False
    """Whether `route` and `fused_experts` are there."""
    quantizations: tuple[str, ...] = ("int8", "int4")
    """What `PackedLinear` takes as `quantization`."""
    edits: LogitEdits | None = None
    """What changes logits before a token is chosen; None: torch does."""

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        """In which dtype hidden states are best kept, for weights of this dtype."""
        return torch.float32

    @abstractmethod
    def PackedLinear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        quantization: str | None = None,
        group_size: int | None = None,
        round_inputs: bool = False,
    ) -> LinearLayer:
        """A linear layer of weight [N, K] and bias [N].

        Nothing refers to `weight` afterwards where a packed copy is made, so the caller can free
        it layer by layer. `quantization` is None or one of `quantizations`: "int8" or "int4", with
        one scale for `group_size` neighbours of a row (a multiple of 16 up to 256, by default 128
        for int8 and 32 for int4), or "fp8" (e4m3), with one scale a row. `round_inputs` lets bf16
        weights meet x rounded to bf16, as a bf16 model would, where that is faster (AVX512-BF16:
        twice as fast for many rows); sums stay float32.
        """

    @abstractmethod
    def IntegerLinear(
        self,
        values: Tensor,
        scales: Tensor,
        minima: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        bits: int,
    ) -> LinearLayer:
        """A linear layer of weights that are quantised already, see `Integers`.

        Scales and minima are kept in float16.
        """

    def StreamedLinear(
        self,
        shape: tuple[int, int],
        pieces: Iterable[Tensor],
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        quantization: str | None = None,
        group_size: int | None = None,
        round_inputs: bool = False,
    ) -> LinearLayer:
        """`PackedLinear` of a weight [N, K] = `shape` that comes in pieces.

        `pieces` are its rows, one piece over the other, each of a multiple of `PIECE_ROWS` rows but
        the last. Each is packed as it comes and nothing of it is kept: its memory may be used again
        for the next. The weight is kept in `dtype` unless it is quantised. Raises
        ValueError for pieces that don't make up `shape`.
        """
        return self.PackedLinear(
            stacked(shape, pieces).to(dtype),
            bias,
            quantization=quantization,
            group_size=group_size,
            round_inputs=round_inputs,
        )

    def StreamedIntegerLinear(
        self,
        shape: tuple[int, int],
        pieces: Iterable[Integers],
        bias: Tensor | None = None,
        *,
        bits: int,
        group_size: int,
        with_minima: bool = False,
    ) -> LinearLayer:
        """`IntegerLinear` of a weight [N, K] = `shape` that comes in pieces.

        They are as for `StreamedLinear`; K must be a multiple of `group_size`, and either all
        pieces have minima or none has.
        """
        check_integer_groups(shape, bits, group_size, with_minima)
        parts = list(pieces)
        for part in parts:
            check_integers(part, shape[1], bits, group_size, with_minima)
        minima = [part.minima for part in parts if part.minima is not None]
        return self.IntegerLinear(
            stacked(shape, (part.values for part in parts)),
            torch.cat([part.scales for part in parts]),
            torch.cat(minima) if minima else None,
            bias,
            bits=bits,
        )

    @abstractmethod
    def use_threads(
        self, count: int, cpus: Sequence[int] | None = None, *, spread: bool = True
    ) -> None:
        """From now on the operations run on `count` threads of this process.

        With `cpus` each keeps to one of them, the calling thread to the first, so that nothing
        makes two threads share a core while another idles: for a process that exists to run a
        model. The compiled kernels have a pool of their own and leave torch one thread: the idle
        threads of torch's pool spin, and would take the cores that the kernels need. Without
        `cpus` they keep their threads apart where there is a CPU for each; not with `spread=False`.
        Raises
        ValueError unless count is at least 1 and this process may run on all of `cpus`.
        """

    def num_threads(self) -> int:
        """How many threads the operations run on."""
        return torch.get_num_threads()

    def compile_experts(self, experts: ExpertLayers) -> CompiledExperts | None:
        """A mixture of experts that runs in one call, where this set has one; else None.

        The linear layers must be of this set. Raises ValueError for weights that don't fit
        together.
        """
        return None

    def compile_decoder(
        self, shape: DecoderShape, layers: list[DecoderLayerWeights], final_norm: NormWeights
    ) -> CompiledDecoder | None:
        """A decoder that runs all layers in one call, where this set has one; else None.

        It does what the separate operations do, to the bit (LayerNorm and activations without a
        gate have none, and are near torch's). The linear layers and experts must be of this set.
        Raises ValueError for weights that don't fit together.
        """
        return None

    @abstractmethod
    def new_kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros for a KV cache, in memory that the kernels read fast.

        Its pages are mapped when they are first written: an idle cache costs nothing.
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H] / rms(x) * weight [H]."""

    @abstractmethod
    def fused_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual` becomes x + residual (in place); gives its norm. Both [T, H], same dtype."""

    @abstractmethod
    def rope_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        q_norm_weight: Tensor | None = None,
        k_norm_weight: Tensor | None = None,
        eps: float = 1e-6,
        neox: bool = True,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> None:
        """Norm and rotate q and k in place, then write k and v to their slots.

        q [T, Hq, D], k and v [T, Hk, D], with any stride between tokens; positions and
        slot_mapping int64 [T]; cos_sin float32 [max_position, rotary_dim], cosines in the first
        half of a row, sines in the second; None: no rotation. The first rotary_dim of D values are
        rotated, as two halves (neox) or as neighbours. Caches [num_blocks, Hk, block_size, D];
        slot = block * block_size + offset; a slot of -1 writes nothing. With norm weights [D] each
        head is RMS-normed before it is rotated. int8 caches come with key_scales and value_scales
        float32 [num_blocks, Hk, block_size]: each token's head is rounded with a scale of its own.
        """

    @abstractmethod
    def paged_attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        scale: float,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of ragged queries over paged keys and values; gives [T, Hq, D].

        q [T, Hq, D], any stride between tokens; caches [num_blocks, Hk, block_size, D];
        block_tables int32 [S, max_blocks]; seq_lens int32 [S], tokens in the cache, those of this
        step included; query_start_loc int32 [S + 1]: sequence s owns the queries
        [query_start_loc[s], query_start_loc[s + 1]), which are its last tokens.

        A query sees itself and the sliding_window - 1 tokens before it (0: all). Scores are
        scale * q.k, then soft_cap * tanh(score / soft_cap), then + slope of the head [Hq] *
        (key position - query position). sinks [Hq] are logits that take part in the softmax and
        bring no value. int8 caches come with their scales, as for `rope_and_cache`.
        """

    @abstractmethod
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [T, 2I] -> silu(first half) * second half, [T, I]."""

    @abstractmethod
    def gelu_and_mul(self, x: Tensor, approximate: str = "none") -> Tensor:
        """x [T, 2I] -> gelu(first half) * second half; approximate: "none" or "tanh"."""

    def route(
        self, scores: Tensor, top_k: int, *, softmax_first: bool = True, renormalize: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The experts of each token: weights float32 and ids int32, [T, top_k], best first.

        scores [T, E]. Weights are a softmax over all experts, renormalised over the chosen or not,
        or over the chosen alone (`softmax_first=False`).
        """
        raise NotImplementedError(f"{self.name} kernels route no experts")

    def fused_experts(
        self,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor,
        ids: Tensor,
        *,
        activation: str = "silu",
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        """[T, H]: each token's experts, weighted and added up.

        x [T, H]; gate_up [E, 2 I, H]; down [E, H, I]; weights and ids as `route` gives them;
        biases [E, 2 I] and [E, H]. `activation` is "silu", "gelu" or "gelu_tanh".
        """
        raise NotImplementedError(f"{self.name} kernels fuse no experts")

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """int64 [R]: the first of the largest of float32 logits [R, vocab] in each row.

        -1 where the largest isn't finite, or one is NaN.
        """

    @abstractmethod
    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniforms: Tensor,
    ) -> Tensor:
        """int64 [R]: a token drawn from each row of float32 logits [R, vocab].

        temperature float32 [R] (0: the likeliest token); top_k int64 [R], at least 1; top_p and
        min_p float64 [R] in (0, 1] and [0, 1]; uniforms float64 [R] in [0, 1). With tokens ordered
        by (logit downwards, id upwards), min-p keeps those at least min_p times as likely as the
        likeliest, top-k the first top_k, top-p the shortest prefix that holds top_p of what they
        left. What is kept is drawn from by inverse CDF in the order of ids. -1 where the largest
        logit isn't finite, or one is NaN.
        """
