"""Pruning of vectors of videos and images.

Efficient Video Sampling (arXiv 2510.14624) drops what hasn't changed since the previous frame. It
compares pixels, so that the number of tokens and their positions are known at admission.
"""

from __future__ import annotations

import math

import numpy as np

from engine.contract.errors import InvalidRequest
from engine.multimodal.inputs import MediaTensors

#: Name of the tensor with the indices of a pruned item's retained vectors, int64 [n], ascending.
RETAINED = "retained"


def retained_vectors(
    kind: str, tensors: MediaTensors, num_vectors: int, grid: tuple[int, ...], rate: float
) -> np.ndarray | None:
    """Return the indices of retained vectors, int64 [n], ascending; None if all are retained.

    Args:
        kind: "video" or "image".
        tensors: the encoder's input, with `pixel_values`. Each vector represents a square of them,
            in reading order.
        num_vectors: the number of squares.
        grid: see `MediaItem`.
        rate: share of the vectors to drop, in [0, 1). A video's first frame and the first square
            of each of an image's tiles are always retained, and of frames that are separate in the
            prompt the square that changed most: without any, their positions would be skipped.

    Raises `InvalidRequest` for pixels that can't be divided into squares.
    """
    if not rate:
        return None
    squares = _squares(tensors["pixel_values"], num_vectors, grid)
    changes = _changes_in_time(squares) if kind == "video" else _changes_in_space(squares)
    if kind == "video" and grid[:1] == (1,):
        for frame in changes:
            frame.flat[frame.argmax()] = np.inf
    num_retained = max(int(np.isinf(changes).sum()), int(num_vectors * (1 - rate)))
    if num_retained >= num_vectors:
        return None
    # The first of equal changes are retained.
    order = np.argsort(-changes.reshape(-1), kind="stable")
    return np.sort(order[:num_retained]).astype(np.int64)


def keep_tokens(replacement: str, token: str, retained: np.ndarray) -> str:
    """Return the text of an item without the tokens of dropped vectors."""
    parts = replacement.split(token)
    tokens = [""] * (len(parts) - 1)
    for index in retained.tolist():
        tokens[index] = token
    return parts[0] + "".join(t + part for t, part in zip(tokens, parts[1:], strict=True))


def retention_mask(retained: np.ndarray, num_vectors: int) -> bytes:
    """Return `MediaItem.retained` for these indices."""
    mask = np.zeros(num_vectors, dtype=bool)
    mask[retained] = True
    return np.packbits(mask).tobytes()


def retained_cells(mask: bytes, grid: tuple[int, ...]) -> list[np.ndarray]:
    """Return which cells of `grid` have a vector, bool [cells] for each of an item's grids that has
    any. `mask` is `MediaItem.retained`, of one grid, or of several if frames are separate.
    """
    num_cells = math.prod(grid)
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8)).astype(bool)
    frames = bits[: len(bits) // num_cells * num_cells].reshape(-1, num_cells)
    return [frame for frame in frames if frame.any()]


def _squares(pixels: np.ndarray, num_vectors: int, grid: tuple[int, ...]) -> np.ndarray:
    """Return each vector's pixels, [frames or tiles, rows, columns, values]."""
    if grid:
        rows, columns = grid[1:]
        return pixels.reshape(num_vectors // (rows * columns), rows, columns, -1)
    *_, channels, height, width = pixels.shape
    tiles = pixels.reshape(-1, channels, height, width)
    side = math.isqrt(num_vectors // len(tiles))
    if not side or len(tiles) * side**2 != num_vectors or height % side or width % side:
        raise InvalidRequest("Pictures of this model can't be pruned.", param="pruning_rate")
    cut = tiles.reshape(len(tiles), channels, side, height // side, side, width // side)
    return cut.transpose(0, 2, 4, 1, 3, 5).reshape(len(tiles), side, side, -1)


def _changes_in_time(squares: np.ndarray) -> np.ndarray:
    """Return each square's difference from the previous frame, [frames, rows, columns]; infinity in
    the first frame.
    """
    changes = np.full(squares.shape[:3], np.inf, dtype=np.float32)
    for index in range(1, len(squares)):
        changes[index] = np.abs(squares[index] - squares[index - 1]).mean(axis=-1)
    return changes


def _changes_in_space(squares: np.ndarray) -> np.ndarray:
    """Return each square's difference from the more similar of its left and upper neighbors,
    [tiles, rows, columns]; infinity for the first square.
    """
    changes = np.full(squares.shape[:3], np.inf, dtype=np.float32)
    row_changes = np.abs(squares[:, :, 1:] - squares[:, :, :-1]).mean(axis=-1)
    column_changes = np.abs(squares[:, 1:] - squares[:, :-1]).mean(axis=-1)
    changes[:, :, 1:] = row_changes
    changes[:, 1:] = np.minimum(changes[:, 1:], column_changes)
    return changes
