"""What the contract's operations are given: packed layers, norms, experts and whole decoders.

T is the number of tokens of a step, H the hidden size, D the size of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.attention_args import BlockSparse
from kernels.lora import ExpertUse, MoeLoraMapping

if TYPE_CHECKING:
    from kernels.ranks import RankGroup


class LinearLayer(ABC):
    """y = x W^T + b with W [N, K] in a layout that the implementation chooses."""

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

    @property
    def row_size(self) -> int:
        """K: the inputs that each output depends on, those of other ranks included."""
        return self.in_features


class AbsentLinear(LinearLayer):
    """A layer that another rank has."""

    nbytes = 0

    def __init__(self, in_features: int = 0, out_features: int = 0) -> None:
        self.in_features, self.out_features = in_features, out_features

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        raise RuntimeError("Another rank has this layer.")

    def rows(self, ids: Tensor) -> Tensor:
        raise RuntimeError("Another rank has this layer.")


SLICE_ROWS = 32
"""Pieces of a weight hold a multiple of so many of its rows."""


@dataclass(frozen=True, slots=True)
class IntegerRows:
    """Rows of weights that are quantised already.

    values int8 [N, K], scales and minima [N, K / group]. Of 8 bits: weight = scale * value, with
    values in [-128, 127]. Of 4 bits: scale * (value - 8), or with minima scale * value - minimum,
    with values in [0, 15]. Zero points, whole numbers in the range of values, stand instead of
    minima: scale * (value - zero), which float16 scales say exactly. Of 8 bits some sets of kernels
    alone take them (`supports_int8_zero_points`).
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
class AttentionWeights:
    """Attention of one layer over keys and values.

    Attributes:
        qkv, o: the projections before and after.
        q_norm, k_norm: RMSNorm of each head, float32 [D]; None: there is none.
        q_full_norm, k_full_norm: RMSNorm of all heads together, float32 [heads * D], or None.
        q_head_norm, k_head_norm: LayerNorm of each head, or None.
        cos_sin: float32 [positions, rotary dimensions]; None: no rotation.
        window: number of tokens that a token attends to, itself included; 0: all.
        sparse, alibi, sinks: see `AttentionArgs`.
    """

    qkv: LinearLayer
    o: LinearLayer
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    q_full_norm: Tensor | None = None
    k_full_norm: Tensor | None = None
    q_head_norm: HeadNormWeights | None = None
    k_head_norm: HeadNormWeights | None = None
    cos_sin: Tensor | None = None
    window: int = 0
    sparse: BlockSparse | None = None
    alibi: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over one token reads."""
        return self.qkv.nbytes + self.o.nbytes


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """up (gate over up where `gated`), the activation, down."""

    up: LinearLayer
    down: LinearLayer
    activation: ActivationSpec
    gated: bool

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over one token reads."""
        return self.up.nbytes + self.down.nbytes


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
        ranks, owners: who share the experts, and the ranks that have each of them; those of others
            are `AbsentLinear`. None: all are here.
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
    ranks: RankGroup | None = None
    owners: Sequence[Sequence[int]] = ()

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
    loads: np.ndarray
    """int64 [experts], tokens that went to each of them, where ranks share them."""
    needs_host_sync: bool = False
    """Whether a pass waits for the device, so that it can't be recorded in a CUDA graph."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]: the weighted sum of what the chosen experts give.

        A token's result doesn't depend on the others.
        """

    def forward_with_adapters(self, x: Tensor, uses: Sequence[ExpertUse]) -> Tensor:
        """The same, with what rows' adapters add to its linear layers; there must be `layers`."""
        raise NotImplementedError(f"{type(self).__name__} takes no adapters")

    def forward_with_slots(self, x: Tensor, rows: MoeLoraMapping) -> Tensor:
        """The same for adapters that have slots."""
        raise NotImplementedError(f"{type(self).__name__} takes no adapters")

    def move(
        self, owners: Sequence[Sequence[int]], loaded: Mapping[int, tuple[LinearLayer, LinearLayer]]
    ) -> None:
        """Change which ranks have which experts, between two passes.

        Args:
            owners: see `ExpertLayers`.
            loaded: gate over up, and down, of the experts that this rank hadn't.
        """
        raise NotImplementedError(f"{type(self).__name__} isn't shared by ranks")

    def shared_linears(self) -> dict[str, LinearLayer]:
        """The layers that every row goes through, by the slots that adapters name."""
        every = {} if self.layers is None else self.layers.linears()
        return {slot: layer for slot, layer in every.items() if "." not in slot}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it is made of, by name; none where its memory isn't torch's."""
        return {}


Activation = Callable[[Tensor], Tensor]


class GatedKernels(Protocol):
    """The gated activations that each set of kernels has: [T, 2I] -> [T, I]."""

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """SiLU of the first half, times the second."""

    def gelu_and_mul(self, x: Tensor, *, approximate: str = "none") -> Tensor:
        """GELU of the first half, times the second. `approximate`: as torch's."""


def activation(name: str) -> Activation:
    """An activation by itself. Raises KeyError for one that isn't known."""
    return _ACTIVATIONS[name]


def gated_activation(ops: GatedKernels, spec: ActivationSpec) -> Activation:
    """[T, 2I] -> [T, I]: the first half activated, times the second.

    Raises KeyError for one that isn't known.
    """
    if spec.name == "silu":
        return ops.silu_and_mul
    if spec.name == "gelu":
        return ops.gelu_and_mul
    if spec.name == "gelu_tanh":
        return lambda x: ops.gelu_and_mul(x, approximate="tanh")
    if spec.name == "swiglu_clamped":
        return lambda x: _swiglu_clamped(x, spec.limit, spec.alpha)
    activate = activation(spec.name)

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activate(gate) * up

    return gated


def _swiglu_clamped(x: Tensor, limit: float, alpha: float) -> Tensor:
    """gpt-oss: both halves are clamped, and the second one counts from 1."""
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(gate * alpha)


def _gelu_tanh(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return torch.relu(x).square_()


_ACTIVATIONS: dict[str, Activation] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": torch.relu,
    "relu2": _relu2,
}
ACTIVATIONS = (*_ACTIVATIONS, "swiglu_clamped")
"""All that there are."""


class PerHeadLinear:
    """y[:, h] = x[:, h] W_h^T, one head after the other: on any set of kernels.

    Attributes:
        nbytes: that one pass over all weights reads.
    """

    def __init__(self, layers: Sequence[LinearLayer]) -> None:
        """`layers`: of each head. Raises ValueError unless they are of one shape."""
        shapes = {(layer.in_features, layer.out_features) for layer in layers}
        if len(shapes) != 1:
            raise ValueError(f"the heads' layers have {len(shapes)} shapes")
        self.layers = list(layers)
        self.nbytes = sum(layer.nbytes for layer in layers)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write [T, heads, N] of x [T, heads, K]; a head's values lie side by side in both."""
        for head, layer in enumerate(self.layers):
            out[:, head] = layer(x[:, head])

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it is made of, by name; none where its memory isn't torch's."""
        return {
            f"{head}.{name}": tensor
            for head, layer in enumerate(self.layers)
            for name, tensor in layer.tensors().items()
        }
