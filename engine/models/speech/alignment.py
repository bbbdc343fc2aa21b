"""Which heads of a model's attention tell when tokens are said."""

from __future__ import annotations

from itertools import product
from typing import Any

from engine.contract.errors import ModelLoadError


def read_alignment_heads(
    generation: dict[str, Any], num_layers: int, num_heads: int
) -> dict[int, tuple[int, ...]]:
    """Heads by layer of a generation_config.json; those of the upper half of the layers, as in
    OpenAI's Whisper, where it names none of this model: distilled ones often have their teacher's.

    Raises `ModelLoadError` for what are no pairs.
    """
    try:
        pairs = [(int(layer), int(head)) for layer, head in generation.get("alignment_heads") or ()]
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelLoadError(
            f"generation_config.json: alignment_heads must be pairs of layer and head: {error}.",
            param="model",
        ) from error
    model_heads = list(product(range(num_layers), range(num_heads)))
    if not pairs or not set(pairs) <= set(model_heads):
        pairs = model_heads[num_layers // 2 * num_heads :]
    heads: dict[int, tuple[int, ...]] = {}
    for layer, head in pairs:
        heads[layer] = (*heads.get(layer, ()), head)
    return heads
