"""What `quantization` means for each part of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights are kept (None: in the model's dtype) and multiplied.

    Attributes:
        layers: linear layers of attention, MLPs and experts.
        tables: the embedding and the output layer.
        round_inputs: bf16 weights may meet activations rounded to bf16.
    """

    layers: str | None = None
    tables: str | None = None
    round_inputs: bool = False


# In four bits the tables move a model's perplexity more than all of its layers together, in eight
# by next to nothing (docs/quantization.md). Routers of experts and norms stay as they are.
_SCHEMES = {
    None: Scheme(),
    "int8": Scheme(layers="int8", tables="int8"),
    "int4": Scheme(layers="int4", tables="int8"),
    "fp8": Scheme(layers="fp8"),
}


def scheme_of(quantization: str | None, round_inputs: bool = False) -> Scheme:
    """The scheme of `EngineConfig.quantization`."""
    return replace(_SCHEMES[quantization], round_inputs=round_inputs)
