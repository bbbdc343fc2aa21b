"""How alike two embeddings are. Torch-free."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.contract.errors import InvalidRequest

Vectors = NDArray[np.float32]


def from_bytes(data: bytes, rows: int | None = None) -> Vectors:
    """A result as it comes from the engine: float32 [size], or [rows, size]."""
    values = np.frombuffer(data, dtype="<f4")
    return values if rows is None else values.reshape(rows, -1)


def similarity(kind: str, first: Vectors, second: Vectors) -> float:
    """Of two float32 [size]: larger is more alike; distances are negative.

    `kind` is sentence-transformers' `similarity_fn_name`: "cosine", "dot", "euclidean" or
    "manhattan". Raises `InvalidRequest` for another.
    """
    a, b = first.astype(np.float64), second.astype(np.float64)
    if kind == "cosine":
        norms = float(np.linalg.norm(a) * np.linalg.norm(b))
        return float(a @ b) / norms if norms else 0.0
    if kind == "dot":
        return float(a @ b)
    if kind == "euclidean":
        return -float(np.linalg.norm(a - b))
    if kind == "manhattan":
        return -float(np.abs(a - b).sum())
    raise InvalidRequest(f"The model's similarity {kind!r} isn't known.", param="model")


def pair_up(num_first: int, num_second: int) -> list[tuple[int, int]]:
    """Which first text meets which second: one with each, or each with its own.

    Raises `InvalidRequest` when the counts are neither 1 to N nor N to N, or 0.
    """
    if num_first < 1 or num_second < 1:
        raise InvalidRequest("Both sides need at least one text.", param="text_2")
    if num_first not in (1, num_second):
        raise InvalidRequest(
            f"{num_first} texts can't be scored against {num_second}: it must be one against "
            "several, or as many on both sides.",
            param="text_2",
        )
    return [(0 if num_first == 1 else place, place) for place in range(num_second)]
