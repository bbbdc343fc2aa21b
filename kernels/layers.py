"""What the contract's operations are given: packed layers, norms, experts and whole decoders.

T is the number of tokens of a step, H the hidden size, D the size of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from kernels.attention.args import BlockSparse
from kernels.lora import ExpertUse, LayerLoras, LoraTable, TableUse
from kernels.lora_slots import MixtureRows

if TYPE_CHECKING:
    from kernels.steps import CompiledStep, StepEnds, StepTables


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

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it is made of, by name; none where its memory isn't torch's."""
        return {}


PIECE_ROWS = 32
"""Pieces of a weight hold a multiple of so many of its rows."""


@dataclass(frozen=True, slots=True)
class Integers:
    """Rows of weights that are quantised already.

    values int8 [N, K], scales and minima [N, K / group]. Of 8 bits: weight = scale * value, with
    values in [-128, 127]. Of 4 bits: scale * (value - 8), or with minima scale * value - minimum,
    with values in [0, 15]. Zero points, whole numbers in the range of values, stand instead of
    minima: scale * (value - zero), which float16 scales say exactly. Of 8 bits some sets of kernels
    alone take them (`byte_zeros`).
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None = None
    zeros: Tensor | None = None

    @property
    def second(self) -> Tensor | None:
        """Minima or zero points."""
        return self.minima if self.zeros is None else self.zeros


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
        sigmoid: each score's sigmoid stands in the place of the softmax over all.
        choice_bias: float32 [experts], added to what experts are chosen by, not to their weights.
        renormalize: divide by the sum of the chosen ones' weights, unless the softmax is over them.
        scale: of the chosen ones' weights.
        groups, top_groups: experts lie in so many groups, side by side, and a token goes to those
            of the best `top_groups` alone.
        group_best: 1 or 2: so many of a group's scores, the best ones, are added up to choose it.
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
    sigmoid: bool = False
    choice_bias: Tensor | None = None
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    shared_gate_up: LinearLayer | None = None
    shared_down: LinearLayer | None = None
    shared_gate: LinearLayer | None = None

    def linears(self) -> dict[str, LinearLayer]:
        """Its linear layers by the slots that adapters name; of expert 3 "up.3" and "down.3"."""
        shared = {
            "shared_up": self.shared_gate_up,
            "shared_down": self.shared_down,
            "shared_gate": self.shared_gate,
        }
        return {
            "router": self.router,
            **{slot: layer for slot, layer in shared.items() if layer is not None},
            **{f"up.{index}": layer for index, layer in enumerate(self.gate_up)},
            **{f"down.{index}": layer for index, layer in enumerate(self.down)},
        }


class MixtureOfExperts(ABC):
    """`ExpertLayers` as one function."""

    nbytes: int
    """Bytes that a pass over one token reads."""
    layers: ExpertLayers | None = None
    """What it is made of; None where adapters can't change it."""
    waits: bool = False
    """Whether a pass waits for the device, so that it can't be recorded in a CUDA graph."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]: the weighted sum of what the chosen experts give.

        A token's result doesn't depend on the others.
        """

    def adapted(self, x: Tensor, uses: Sequence[ExpertUse]) -> Tensor:
        """The same, with what rows' adapters add to its linear layers; there must be `layers`."""
        raise NotImplementedError(f"{type(self).__name__} takes no adapters")

    def slotted(self, x: Tensor, rows: MixtureRows) -> Tensor:
        """The same for adapters that have slots."""
        raise NotImplementedError(f"{type(self).__name__} takes no adapters")

    def of_all_rows(self) -> dict[str, LinearLayer]:
        """The layers that every row goes through, by the slots that adapters name."""
        every = {} if self.layers is None else self.layers.linears()
        return {slot: layer for slot, layer in every.items() if "." not in slot}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it is made of, by name; none where its memory isn't torch's."""
        return {}


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
    attention takes. `sliding_window`, `sparse`, `alibi` and `sinks` are those of `paged_attention`.
    Queries
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
    sparse: BlockSparse | None = None
    alibi: Tensor | None = None
    sinks: Tensor | None = None
    o: LinearLayer
    attention_out_norm: NormWeights = NO_NORM
    mlp_norm: NormWeights
    gate_up: LinearLayer | None = None
    down: LinearLayer | None = None
    experts: MixtureOfExperts | None = None
    mlp_out_norm: NormWeights = NO_NORM
    group: int = 0


class LayerInputs(NamedTuple):
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
        others: Sequence[tuple[Tensor, Tensor]] = (),
        adapters: Sequence[TableUse] = (),
        inputs: LayerInputs | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, float32 [R, H].

        hidden float32 [T, H], contiguous: the embeddings; overwritten, by the residual behind the
        last layer where all tokens are wanted. rows int64 [R]: those wanted, all by default.
        `others` are slot_mapping and block_tables of the groups 1, 2, ... `adapters` name the
        tokens that go through one, as for `KernelSet.add_lora`. `inputs` gets what some layers
        begin with, of all tokens. The rest is as for `rope_and_cache` and `paged_attention`.

        Raises ValueError for what doesn't fit together.
        """

    def lora_table(self, layers: LayerLoras) -> LoraTable | None:
        """An adapter for this decoder; None where it changes what one call can't have changed."""
        return None

    def compile_step(
        self, ends: StepEnds, tables: StepTables, taps: Sequence[int] = ()
    ) -> CompiledStep | None:
        """Whole decode steps in one call each, where this set has that; else None. With `taps`,
        layers, they tell of what these begin with.

        They give what this decoder and the operations around it do, to the bit. The layers must be
        of this set. Raises ValueError for what doesn't fit together.
        """
        return None
