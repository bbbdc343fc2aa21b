"""Computes when tokens are spoken, from some heads' attention to the audio, outside the steps.

This is OpenAI's method: the heads' weights are normalized over the tokens, smoothed over time by a
median, averaged, and the cheapest monotonic path through them gives the start of each token.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from engine.contract.messages import ErrorInfo, TokenDelta

log = logging.getLogger(__name__)

#: Seconds of audio that one encoder state covers.
SECONDS_PER_STATE = 0.02
#: Width of the median filter in states, as in OpenAI's Whisper.
_MEDIAN_WIDTH = 7
#: Pairs to compare and swap, after which the middle one of seven values is the median.
_MEDIAN_NETWORK = (
    *((0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6)),
    *((2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4)),
)
#: Moves of a path: to the next token and state, to the next token, to the next state.
_BOTH, _TOKEN, _STATE = 0, 1, 2


class TokenAligner:
    """A thread that turns recorded attention into times, so that no step waits for it."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "alignment")
        self._pending: deque[tuple[Future[bytes], TokenDelta, Callable[[], None] | None]] = deque()

    @property
    def has_pending(self) -> bool:
        """Whether `pop_ready` may return something."""
        return bool(self._pending)

    def submit(
        self,
        delta: TokenDelta,
        weights: bytes,
        num_tokens: int,
        num_states: int,
        on_done: Callable[[], None] | None,
    ) -> None:
        """Compute the times for a complete prompt, for `delta.pooled`.

        Args:
            weights: float32 [heads, num_tokens, num_states], little-endian.
            on_done: called when the delta is popped; until then the client sees the request as
            running.
        """
        future = self._executor.submit(_encoded_times, weights, num_tokens, num_states)
        self._pending.append((future, delta, on_done))

    def pop_ready(self, timeout_s: float | None = 0.0) -> list[TokenDelta]:
        """Completed deltas, after waiting up to `timeout_s` for the first; None: wait for all."""
        wait([future for future, *_ in self._pending][: 1 if timeout_s is not None else None],
             timeout_s)  # fmt: skip
        deltas = []
        while self._pending and self._pending[0][0].done():
            future, delta, on_done = self._pending.popleft()
            try:
                delta.pooled = future.result()
            except Exception as error:
                log.exception("The tokens of %s can't be aligned.", delta.request_id)
                message = f"The engine failed on this request: {error}"
                delta.finish_reason = "error"
                delta.error = ErrorInfo(message=message, code="engine_fault")
            deltas.append(delta)
            if on_done is not None:
                on_done()
        return deltas

    def close(self) -> None:
        """Stop the thread; computations that haven't started are dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _encoded_times(weights: bytes, num_tokens: int, num_states: int) -> bytes:
    values = np.frombuffer(weights, dtype="<f4").reshape(-1, num_tokens, num_states)
    return token_times(values).astype("<f4").tobytes()


def token_times(weights: np.ndarray) -> np.ndarray:
    """Start of each token in seconds, float32 [num_tokens].

    Args:
        weights: attention weights, float32 [heads, num_tokens, num_states].
    """
    total = np.zeros(weights.shape[1:], dtype=np.float32)
    for head in weights:  # one at a time to save memory
        mean, deviation = head.mean(axis=0), head.std(axis=0)
        # States that all tokens attend to equally carry no information.
        scaled = np.divide(head - mean, deviation, out=np.zeros_like(head), where=deviation > 0)
        total += _smooth(scaled)
    first_states = _cheapest_path(-total.astype(np.float64) / len(weights))
    return (first_states * SECONDS_PER_STATE).astype(np.float32)


def _smooth(values: np.ndarray) -> np.ndarray:
    """The median of each value and its neighbours in a row."""
    pad, count = _MEDIAN_WIDTH // 2, values.shape[-1]
    if count <= pad:
        return values
    padded = np.pad(values, ((0, 0), (pad, pad)), mode="reflect")
    shifted = [padded[:, offset : offset + count] for offset in range(_MEDIAN_WIDTH)]
    for low, high in _MEDIAN_NETWORK:
        shifted[low], shifted[high] = (
            np.minimum(shifted[low], shifted[high]),
            np.maximum(shifted[low], shifted[high]),
        )
    return shifted[pad]


def _cheapest_path(costs: np.ndarray) -> np.ndarray:
    """Dynamic time warping: the first column of each row, int64 [rows], on the cheapest path from
    the first corner of `costs` [rows, columns] to the last.

    Cells of a diagonal don't depend on each other, so they are computed at once.
    """
    num_rows, num_columns = costs.shape
    steps = np.full((num_rows + 1, num_columns + 1), _STATE, dtype=np.uint8)
    steps[1:, 0] = _TOKEN
    # The two previous diagonals, by row; row 0 is before the first one.
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
