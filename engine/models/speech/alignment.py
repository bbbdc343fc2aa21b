"""The cross-attention heads from which Whisper's token timestamps are computed."""

from __future__ import annotations

from itertools import product
from typing import Any

from engine.contract.errors import ModelLoadError


def read_alignment_heads(
    generation: dict[str, Any], num_layers: int, num_heads: int
) -> dict[int, tuple[int, ...]]:
    """Return the heads in generation_config.json by layer. If there are none, or some don't exist
    in this model, as distilled models often have their teacher's, return all heads of the upper
    half of the layers, as OpenAI's Whisper does.

    Raises `ModelLoadError` unless `alignment_heads` consists of pairs.
    """
    try:
        pairs = [(int(layer), int(head)) for layer, head in generation.get("alignment_heads") or ()]
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelLoadError(
            f"generation_config.json: alignment_heads must be pairs of layer and head: {error}."
        ) from error
    model_heads = list(product(range(num_layers), range(num_heads)))
    if not pairs or not set(pairs) <= set(model_heads):
        pairs = model_heads[num_layers // 2 * num_heads :]
    heads: dict[int, tuple[int, ...]] = {}
    for layer, head in pairs:
        heads[layer] = (*heads.get(layer, ()), head)
    return heads
