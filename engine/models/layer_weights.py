"""A layer's weights as they were loaded, from which both plain and compiled layers are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

from torch import Tensor

from engine.models.description import Wiring
from engine.models.spec import LatentSpec, StateSpec
from kernels import LinearLayer
from kernels.attention import BlockSparse
from kernels.interface import (
    NO_NORM,
    ActivationSpec,
    HeadLinears,
    HeadNormWeights,
    MixtureOfExperts,
    NormWeights,
    ScanWeights,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """See `AttentionDescription`. Queries and keys are normed in one of the kernels' ways, see
    `kernels.interface.DecoderLayerWeights`; no weight: they aren't.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StateWeights:
    """See `StateDescription`. `conv` [width, channels] and what follows are float32."""

    state: StateSpec
    inputs: LinearLayer
    rates: LinearLayer | None
    output: LinearLayer
    conv: Tensor
    conv_bias: Tensor | None
    scan: ScanWeights
    norm: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over one token reads."""
        rates = 0 if self.rates is None else self.rates.nbytes
        return self.inputs.nbytes + rates + self.output.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    """See `LatentDescription`; norms are float32.

    Attributes:
        into: of each head, from what isn't rotated of its query to what meets latents.
        out_of: of each head, from the latents' weighted sum to that of its values.
    """

    latents: LatentSpec
    inputs: LinearLayer
    queries: LinearLayer | None
    query_norm: Tensor | None
    latent_norm: Tensor
    into: HeadLinears
    out_of: HeadLinears
    o: LinearLayer
    cos_sin: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over one token reads."""
        parts = (self.inputs, self.queries, self.into, self.out_of, self.o)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """See `MlpDescription`."""

    up: LinearLayer
    down: LinearLayer
    activation: ActivationSpec
    gated: bool

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over one token reads."""
        return self.up.nbytes + self.down.nbytes


MeetingWeights = AttentionWeights | StateWeights | LatentWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """See `LayerDescription`. It has either an `mlp` or `experts`."""

    wiring: Wiring
    input_norm: NormWeights
    attention: MeetingWeights
    attention_out_norm: NormWeights = NO_NORM
    mlp_norm: NormWeights | None
    mlp: MlpWeights | None = None
    experts: MixtureOfExperts | None = None
    mlp_out_norm: NormWeights = NO_NORM
    residual_norm: NormWeights = NO_NORM
    residual_mlp: MlpWeights | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a pass over one token reads."""
        blocks = (self.mlp, self.experts, self.residual_mlp)
        return self.attention.nbytes + sum(block.nbytes for block in blocks if block is not None)


def named_tensors(weights: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of some weights, by the names of their fields behind `name`."""
    if isinstance(weights, Tensor):
        yield name, weights
    elif isinstance(weights, LinearLayer | MixtureOfExperts | HeadLinears):
        for part, tensor in weights.tensors().items():
            yield f"{name}.{part}", tensor
    elif is_dataclass(weights):
        for field in fields(weights):
            yield from named_tensors(getattr(weights, field.name), f"{name}.{field.name}")
