"""What `quantization` means for each part of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a model's weights are kept; None: in the model's dtype.

    Attributes:
        layers: linear layers of attention, MLPs and experts.
        tables: the embedding and the output layer.
    """

    layers: str | None = None
    tables: str | None = None


# In four bits the tables move a model's perplexity more than all of its layers together, in eight
# by next to nothing (docs/quantization.md). Routers of experts and norms stay as they are.
_SCHEMES = {
    None: Scheme(),
    "int8": Scheme(layers="int8", tables="int8"),
    "int4": Scheme(layers="int4", tables="int8"),
    "fp8": Scheme(layers="fp8"),
}


def scheme_of(quantization: str | None) -> Scheme:
    """The scheme of `EngineConfig.quantization`."""
    return _SCHEMES[quantization]
