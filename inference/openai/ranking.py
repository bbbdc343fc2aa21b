"""`best_of`: the likeliest outputs of those that were made."""

from __future__ import annotations

from collections.abc import Sequence

from inference.generation.output import OutputState


def best_outputs(outputs: Sequence[OutputState], n: int) -> list[int]:
    """Indices of the outputs to return: all in order, or the best by cumulative log probability."""
    if len(outputs) <= n:
        return list(range(len(outputs)))
    return sorted(range(len(outputs)), key=lambda index: -outputs[index].sum_logprobs)[:n]
