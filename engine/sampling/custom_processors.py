"""Custom logits processors: of requests (offline only) and of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.sampling.logits_processor import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    MovedRequest,
    RequestLogitsProcessor,
    takes_prompt,
)
from engine.sampling.request_state import RequestSamplingState


class RequestLogitsProcessors:
    """The logits processors of a batch's requests."""

    def __init__(self, states: Sequence[RequestSamplingState]) -> None:
        self._rows = [
            (row, state, [(fn, takes_prompt(fn)) for fn in state.params.logits_processors])
            for row, state in enumerate(states)
            if state.params.logits_processors
        ]

    @property
    def empty(self) -> bool:
        """Whether no sequence has a processor."""
        return not self._rows

    def apply(self, logits: Tensor) -> dict[int, str]:
        """Apply them to `logits` ([rows, vocab], float32) in place; return errors by row."""
        errors: dict[int, str] = {}
        for row, state, processors in self._rows:
            try:
                logits[row] = self._run(logits[row].clone(), state, processors)
            except Exception as error:  # a caller's function: only its row fails
                errors[row] = f"A logits processor failed: {type(error).__name__}: {error}"
        return errors

    @staticmethod
    def _run(
        logits: Tensor,
        state: RequestSamplingState,
        processors: Sequence[tuple[RequestLogitsProcessor, bool]],
    ) -> Tensor:
        for processor, reads_prompt in processors:
            arguments = [state.output_token_ids, logits]
            if reads_prompt:
                arguments.insert(0, list(state.prompt_token_ids))
            result = processor(*arguments)
            if not isinstance(result, torch.Tensor) or result.shape != logits.shape:
                raise ValueError("it must return logits of the shape of its argument")
            logits = result
        return logits


class LogitsProcessors:
    """The engine's logits processors, updated with each step's rows.

    An error of a processor fails the step. Its sequences then run one by one, so that only the
    request that causes the error fails. request that causes it fails.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        factory: Callable[[], Sequence[LogitsProcessor]] | None = None,
    ) -> None:
        """`factory`: creates the same processors for another vocabulary size."""
        self._factory = factory
        self._early = [item for item in processors if not item.is_argmax_invariant()]
        self._late = [item for item in processors if item.is_argmax_invariant()]
        self._rows: list[RequestSamplingState] = []
        self._max_known_rows = 0

    def sibling(self) -> LogitsProcessors:
        """Return the same processors for another vocabulary size."""
        if self._factory is None:
            raise RuntimeError("These logits processors have no factory.")
        return LogitsProcessors(self._factory(), self._factory)

    def update(self, states: Sequence[RequestSamplingState]) -> None:
        """Set the step's rows."""
        if (rows := list(states)) == self._rows:
            change = None
        else:
            change = batch_update(self._rows, rows, self._max_known_rows)
        # No row counts as known until all are updated: after a failure all rows are added again.
        self._rows, self._max_known_rows = [], max(self._max_known_rows, len(rows))
        for processor in (*self._early, *self._late):
            processor.update_state(change)
        self._rows, self._max_known_rows = rows, len(rows)

    def apply(self, logits: Tensor) -> None:
        """Change `logits`, float32 [rows, vocab], in place, before penalties."""
        for processor in self._early:
            _run(processor, logits)

    def apply_to_draws(self, logits: Tensor) -> None:
        """As `apply`, for processors that keep the argmax; called after penalties."""
        params = [state.params for state in self._rows]
        if not self._late or all(p.greedy for p in params):
            return
        temperatures = [1.0 if p.greedy else p.temperature for p in params]
        column = torch.tensor(temperatures, device=logits.device)[:, None]
        logits /= column  # they expect logits after temperature; undone below
        for processor in self._late:
            _run(processor, logits)
        logits *= column


def _run(processor: LogitsProcessor, logits: Tensor) -> None:
    changed = processor.apply(logits)
    if not isinstance(changed, Tensor) or changed.shape != logits.shape:
        raise ValueError(
            f"The logits processor {type(processor).__name__} must return logits of the shape "
            "of its argument."
        )
    if changed is not logits:
        logits.copy_(changed)


def batch_update(
    previous: Sequence[RequestSamplingState],
    current: Sequence[RequestSamplingState],
    max_known_rows: int,
) -> BatchUpdate:
    """Return the update that leads from one list of rows to another.

    New sequences first take the rows of removed ones, then additional rows; then rows are moved, so
    that a processor's state of a sequence moves with it.

    `max_known_rows`: number of rows that processors may have state for, of which `previous` are
    certain.
    """
    staying, already_present = set(map(id, current)), set(map(id, previous))
    rows: list[RequestSamplingState | None] = [
        state if id(state) in staying else None for state in previous
    ]
    rows += [None] * (max(max_known_rows, len(current)) - len(rows))
    free = [row for row, state in enumerate(rows) if state is None]
    added: list[AddedRequest] = []
    for state in (state for state in current if id(state) not in already_present):
        row = free.pop(0)
        rows[row] = state
        prompt = list(state.prompt_token_ids) or None
        added.append((row, state.params, prompt, state.output_token_ids))
    removed = [row for row in reversed(free) if row < max_known_rows]
    return BatchUpdate(len(current), removed, added, _moves(rows, current))


def _moves(
    rows: list[RequestSamplingState | None], order: Sequence[RequestSamplingState]
) -> list[MovedRequest]:
    """Return the moves that bring `rows` into this order."""
    row_of = {id(state): row for row, state in enumerate(rows) if state is not None}
    moves: list[MovedRequest] = []
    for target, state in enumerate(order):
        source, displaced = row_of[id(state)], rows[target]
        if source == target:
            continue
        if displaced is None:
            direction = MoveDirectionality.UNIDIRECTIONAL
        else:
            direction = MoveDirectionality.SWAP
            row_of[id(displaced)] = source
        moves.append((source, target, direction))
        rows[source], rows[target] = displaced, state
        row_of[id(state)] = target
    return moves
