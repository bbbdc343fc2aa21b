"""When tokens are said, by the attention of some heads to the sound.

This is OpenAI's method: the heads' weights are normalised over the tokens, smoothed over time by a
median, averaged, and the cheapest monotonic path through them gives each token's beginning.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.contract.errors import ModelLoadError

#: Seconds of sound that one state of the encoder hears.
SECONDS_PER_STATE = 0.02
#: Number of states of the median, as in OpenAI's Whisper.
_MEDIAN_WIDTH = 7
#: Steps of a path: to the next token and state, to the next token, to the next state.
_BOTH, _TOKEN, _STATE = 0, 1, 2


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


def token_times(weights: Tensor) -> np.ndarray:
    """Second at which each token begins, float32 [num_tokens].

    Args:
        weights: of attention, float32 [heads, num_tokens, num_states].
    """
    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
    # States that all tokens attend to alike tell nothing.
    weights = ((weights - mean) / deviation).nan_to_num()
    pad = _MEDIAN_WIDTH // 2
    if weights.shape[-1] > pad:
        padded = torch.nn.functional.pad(weights, (pad, pad), mode="reflect")
        # Head by head: a median copies its windows, which are seven times the weights.
        windows = padded.unfold(-1, _MEDIAN_WIDTH, 1)
        weights = torch.stack([head.median(dim=-1).values for head in windows])
    first_states = _cheapest_path(-weights.mean(dim=0).double().numpy())
    return (first_states * SECONDS_PER_STATE).astype(np.float32)


def _cheapest_path(costs: np.ndarray) -> np.ndarray:
    """Dynamic time warping: the first column of each row, int64 [rows], on the cheapest path from
    the first corner of `costs` [rows, columns] to the last.

    Cells of one diagonal don't depend on each other, so they are computed at once.
    """
    num_rows, num_columns = costs.shape
    steps = np.full((num_rows + 1, num_columns + 1), _STATE, dtype=np.uint8)
    steps[1:, 0] = _TOKEN
    # Of the two diagonals before, by row; row 0 is before the first one.
    second_last = np.full(num_rows + 1, np.inf, dtype=np.float32)
    second_last[0] = 0
    last = np.full(num_rows + 1, np.inf, dtype=np.float32)
    for diagonal in range(2, num_rows + num_columns + 1):
        first, end = max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1
        rows = np.arange(first, end)
        both, token = second_last[first - 1 : end - 1], last[first - 1 : end - 1]
        state = last[first:end]
        takes_both = (both < token) & (both < state)
        takes_token = (token < both) & (token < state)
        cheapest = np.where(takes_both, both, np.where(takes_token, token, state))
        columns = diagonal - rows
        steps[rows, columns] = np.where(takes_both, _BOTH, np.where(takes_token, _TOKEN, _STATE))
        current = np.full(num_rows + 1, np.inf, dtype=np.float32)
        current[first:end] = costs[rows - 1, columns - 1] + cheapest
        second_last, last = last, current
    first_columns = np.zeros(num_rows, dtype=np.int64)
    row, column = num_rows, num_columns
    while row > 0:
        first_columns[row - 1] = max(column - 1, 0)
        step = steps[row, column]
        row -= step != _STATE
        column -= step != _TOKEN
    return first_columns
