"""A layer's weights as they are loaded by its description; layers run them, plain or compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

from torch import Tensor

from engine.models.decoder_spec import MambaSpec, MlaSpec
from engine.models.layers.linear import Wiring
from kernels import LinearLayer
from kernels.interface import (
    NO_NORM,
    AttentionWeights,
    MixtureOfExperts,
    MlpWeights,
    NormWeights,
    PerHeadLinear,
    ScanWeights,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """Weights that are loaded and run together."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a pass over a token reads."""
        parts = (getattr(self, part.name) for part in fields(self))
        return sum(part.nbytes for part in parts if isinstance(part, _READ_PARTS))


_READ_PARTS = (
    LinearLayer, PerHeadLinear, AttentionWeights, MlpWeights, MixtureOfExperts, WeightGroup,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LruWeights(WeightGroup):
    """Learned weights of a real-gated linear recurrent unit.

    Attributes:
        gates: each head's projection of its channels to input gates, followed by recurrence gates.
        gate_biases: float32 [heads, 2 * value_size].
        decay: float32 [values], the logarithm of the decay for a recurrence gate of 1.
    """

    gates: PerHeadLinear
    gate_biases: Tensor
    decay: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateWeights(WeightGroup):
    """See `StateDescription`. `conv` [width, channels] and all fields after it but `lru` are
    float32.

    Attributes:
        input_scales: factors of the input projection's outputs; None for 1.
        lru: the weights of "rg_lru", which has no `scan`.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseIndexWeights(WeightGroup):
    """See `SparseIndexDescription`; the norm's tensors are float32 [head_dim]."""

    queries: LinearLayer
    keys: LinearLayer
    key_norm: Tensor
    key_norm_bias: Tensor
    weights: LinearLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights(WeightGroup):
    """See `LatentDescription`; norms are float32.

    Attributes:
        into: each head's projection from the unrotated part of its query to the latents' space.
        out_of: each head's projection from the weighted sum of latents to that of its values.
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


TokenMixerWeights = AttentionWeights | StateWeights | LatentWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlockWeights(WeightGroup):
    """See `SharedBlockDescription`; layers with the same block share its tensors."""

    attention_norm: NormWeights
    attention: AttentionWeights
    mlp_norm: NormWeights
    mlp: MlpWeights
    output: LinearLayer
    mixer_norm: NormWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpWeights(WeightGroup):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpModelWeights:
    """See `AltUpModelDescription`; the rows of `table` are the layers' embeddings."""

    table: LinearLayer
    projection: LinearLayer
    projection_norm: NormWeights
    expand: tuple[LinearLayer, ...]
    collapse: tuple[LinearLayer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossWeights(WeightGroup):
    """See `CrossDescription`."""

    norm: NormWeights
    queries: LinearLayer
    kv: LinearLayer
    output: LinearLayer

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over a token reads; keys and values are computed only once."""
        return self.queries.nbytes + self.output.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights(WeightGroup):
    """See `LayerDescription`. Both plain and compiled layers are built from these weights.

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


def named_tensors(weights: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of weights with their field names after `name`."""
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
