"""Arguments of the kernels' operations: packed layers, norms, experts and whole decoders.

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
    """Bytes that a pass over the weight reads."""

    @abstractmethod
    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return [M, N] for x [M, K]. Rows of x may be strided; `out` must be contiguous."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows ids int64 [T] of W, float32 [T, K].

        With this a tied output layer also serves as the embedding, and is stored once.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by name; empty if its memory isn't torch's."""
        return {}

    @property
    def row_size(self) -> int:
        """K, the number of inputs of each output, including those on other ranks."""
        return self.in_features


class AbsentLinear(LinearLayer):
    """A layer on another rank."""

    nbytes = 0

    def __init__(self, in_features: int = 0, out_features: int = 0) -> None:
        self.in_features, self.out_features = in_features, out_features

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        raise RuntimeError("Another rank has this layer.")

    def rows(self, ids: Tensor) -> Tensor:
        raise RuntimeError("Another rank has this layer.")


SLICE_ROWS = 32
"""Slices of a weight, except the last, have a multiple of this many rows."""


@dataclass(frozen=True, slots=True)
class IntegerRows:
    """Rows of quantized weights.

    values are int8 [N, K], scales and minima [N, K / group]. With 8 bits weight = scale * value,
    with values in [-128, 127]. With 4 bits weight = scale * (value - 8), or with minima scale *
    value - minimum, with values in [0, 15]. Instead of minima there may be integer zero points in
    the range of values: weight = scale * (value - zero), which is exact with float16 scales. Only
    some kernel sets support these with 8 bits (`supports_int8_zero_points`).
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
    """A norm: "rms" (with a weight), "layer" (weight and bias are optional), or "none".

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
    """An MLP's activation.

    Attributes:
        name: "silu", "gelu", "gelu_tanh", "relu", "relu2", or "swiglu_clamped", which is gated:
        both halves are clamped to `limit`, the first is multiplied with the sigmoid of `alpha`
        times itself, and 1 is added to the second.
    """

    name: str = "silu"
    limit: float = 0.0
    alpha: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """A layer's attention over keys and values.

    Attributes:
        qkv, o: the projections before and after.
        q_norm, k_norm: RMSNorm of each head, float32 [D]; or None.
        q_full_norm, k_full_norm: RMSNorm of all heads together, float32 [heads * D], with those
            that other ranks have; or None.
        local_columns: int64, the columns of `qkv` that this rank keeps after these; None for all.
        q_head_norm, k_head_norm: LayerNorm of each head, or None.
        cos_sin: float32 [positions, rotary dimensions]; None without rotary embedding.
        window: number of tokens that a token attends to, including itself; 0 for all.
        sparse, alibi, distance_bias, sinks: see `AttentionArgs`.
    """

    qkv: LinearLayer
    o: LinearLayer
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    q_full_norm: Tensor | None = None
    local_columns: Tensor | None = None
    k_full_norm: Tensor | None = None
    q_head_norm: HeadNormWeights | None = None
    k_head_norm: HeadNormWeights | None = None
    cos_sin: Tensor | None = None
    window: int = 0
    sparse: BlockSparse | None = None
    alibi: Tensor | None = None
    distance_bias: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over a token reads."""
        return self.qkv.nbytes + self.o.nbytes


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """An MLP: up (rows of gate, then of up, if `gated`), the activation, down."""

    up: LinearLayer
    down: LinearLayer
    activation: ActivationSpec
    gated: bool

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over a token reads."""
        return self.up.nbytes + self.down.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """A mixture of gated experts.

    Attributes:
        router: [T, H] -> [T, experts].
        gate_up, down: each expert's layers.
        softmax_first: softmax over all experts before choosing `top_k`; else over the chosen.
        sigmoid: the sigmoid of each score instead of the softmax over all.
        choice_bias: float32 [experts], added to the scores for choosing experts only.
        renormalize: divide weights by their sum over the chosen experts.
        scale: multiplies the chosen experts' weights.
        groups, top_groups: the number of equal groups of consecutive experts; a token is routed
        to experts in the best `top_groups` of them.
        group_best: 1 or 2, the number of a group's best scores whose sum ranks the group.
        shared_gate_up, shared_down: an expert for every token.
        shared_gate: [T, H] -> [T, 1], whose sigmoid is the shared expert's weight.
        ranks, owners: the rank group that shares the experts, and the ranks with each of them;
        experts on other ranks are `AbsentLinear`. None if all are local.
        row_ranks: as many consecutive ranks have the same tokens, others their own, maybe none; all
        ranks call it equally often. 0: all ranks have the same tokens.
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
    row_ranks: int = 0

    def linears(self) -> dict[str, LinearLayer]:
        """Return its linear layers by adapter slot; expert 3 has "up.3" and "down.3"."""
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
    """Bytes that a pass over a token reads."""
    layers: ExpertLayers | None = None
    """Its layers; None if it doesn't support adapters."""
    loads: np.ndarray
    """int64 [experts], the number of tokens routed to each, if ranks share them."""
    needs_host_sync: bool = False
    """Whether a pass waits for the device, so that it can't be captured in a CUDA graph."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Compute the weighted sum of the chosen experts' outputs, [T, H] -> [T, H].

        A token's result doesn't depend on the others.
        """

    def forward_with_adapters(self, x: Tensor, uses: Sequence[ExpertUse]) -> Tensor:
        """Compute the same with the adapters of rows; requires `layers`."""
        raise NotImplementedError(f"{type(self).__name__} takes no adapters")

    def forward_with_slots(self, x: Tensor, rows: MoeLoraMapping) -> Tensor:
        """Compute the same with adapters in slots."""
        raise NotImplementedError(f"{type(self).__name__} takes no adapters")

    def move(
        self, owners: Sequence[Sequence[int]], loaded: Mapping[int, tuple[LinearLayer, LinearLayer]]
    ) -> None:
        """Move experts between ranks, between two passes.

        Args:
            owners: see `ExpertLayers`.
            loaded: gate_up and down of the experts that are new on this rank.
        """
        raise NotImplementedError(f"{type(self).__name__} isn't shared by ranks")

    def shared_linears(self) -> dict[str, LinearLayer]:
        """Return the layers for every row by adapter slot."""
        every = {} if self.layers is None else self.layers.linears()
        return {slot: layer for slot, layer in every.items() if "." not in slot}

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by name; empty if its memory isn't torch's."""
        return {}


Activation = Callable[[Tensor], Tensor]


class GatedKernels(Protocol):
    """The gated activations of a kernel set, [T, 2I] -> [T, I]."""

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """Compute SiLU of the first half, times the second."""

    def gelu_and_mul(self, x: Tensor, *, approximate: str = "none") -> Tensor:
        """Compute GELU of the first half, times the second. `approximate` is torch's."""


def activation(name: str) -> Activation:
    """Return an activation without a gate. Raises KeyError for an unknown one."""
    return _ACTIVATIONS[name]


def gated_activation(ops: GatedKernels, spec: ActivationSpec) -> Activation:
    """Return a gated activation, [T, 2I] -> [T, I].

    Raises KeyError for an unknown one.
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
    """gpt-oss: both halves are clamped, and 1 is added to the second."""
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
"""Names of all activations."""


class PerHeadLinear:
    """y[:, h] = x[:, h] W_h^T, head by head, for any kernel set.

    Attributes:
        nbytes: bytes that a pass over all weights reads.
    """

    def __init__(self, layers: Sequence[LinearLayer]) -> None:
        """`layers` has one layer per head. Raises ValueError unless their shapes are equal."""
        shapes = {(layer.in_features, layer.out_features) for layer in layers}
        if len(shapes) != 1:
            raise ValueError(f"the heads' layers have {len(shapes)} shapes")
        self.layers = list(layers)
        self.nbytes = sum(layer.nbytes for layer in layers)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write [T, heads, N] for x [T, heads, K]; the last dimension of both is contiguous."""
        for head, layer in enumerate(self.layers):
            out[:, head] = layer(x[:, head])

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by name; empty if its memory isn't torch's."""
        return {
            f"{head}.{name}": tensor
            for head, layer in enumerate(self.layers)
            for name, tensor in layer.tensors().items()
        }
