"""`LogitsProcessors`: the engine's logits processors, and what they know of the rows."""

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
    """The logits processors of a batch."""

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
        """Run them on `logits` ([rows, vocab], float32) in place; returns what failed, by row."""
        errors: dict[int, str] = {}
        for row, state, processors in self._rows:
            try:
                logits[row] = self._run(logits[row].clone(), state, processors)
            except Exception as error:  # a caller's function may raise anything; its row alone ends
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
                raise ValueError("it must return logits of the shape it was given")
            logits = result
        return logits


class LogitsProcessors:
    """Tells processors of each step's rows, and runs them on its logits.

    What a processor raises fails the step; its sequences then run one by one, so that the request
    that it can't bear fails alone.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        anew: Callable[[], Sequence[LogitsProcessor]] | None = None,
    ) -> None:
        """`anew`: makes the same once more; None: there are no rows of another vocabulary."""
        self._anew = anew
        self._early = [each for each in processors if not each.is_argmax_invariant()]
        self._late = [each for each in processors if each.is_argmax_invariant()]
        self._rows: list[RequestSamplingState] = []
        self._num_told = 0

    def sibling(self) -> LogitsProcessors:
        """The same for rows of another vocabulary, of which they are told apart from these."""
        if self._anew is None:
            raise RuntimeError("Nothing makes these logits processors once more.")
        return LogitsProcessors(self._anew(), self._anew)

    def update(self, states: Sequence[RequestSamplingState]) -> None:
        """The step's rows are these sequences."""
        if (rows := list(states)) == self._rows:
            change = None
        else:
            change = batch_update(self._rows, rows, self._num_told)
        # Until all of them know, nothing is known: after a failure they're told anew from scratch.
        self._rows, self._num_told = [], max(self._num_told, len(rows))
        for processor in (*self._early, *self._late):
            processor.update_state(change)
        self._rows, self._num_told = rows, len(rows)

    def apply(self, logits: Tensor) -> None:
        """Change `logits`, float32 [rows, vocab], in place, before penalties."""
        for processor in self._early:
            _run(processor, logits)

    def apply_to_draws(self, logits: Tensor) -> None:
        """The same with processors that leave the likeliest token what it is, after penalties."""
        params = [state.params for state in self._rows]
        if not self._late or all(each.greedy for each in params):
            return
        temperatures = [1.0 if each.greedy else each.temperature for each in params]
        column = torch.tensor(temperatures, device=logits.device)[:, None]
        logits /= column  # they see what is drawn from; the temperature itself comes later
        for processor in self._late:
            _run(processor, logits)
        logits *= column


def _run(processor: LogitsProcessor, logits: Tensor) -> None:
    changed = processor.apply(logits)
    if not isinstance(changed, Tensor) or changed.shape != logits.shape:
        raise ValueError(
            f"The logits processor {type(processor).__name__} must return logits of the shape "
            "it was given."
        )
    if changed is not logits:
        logits.copy_(changed)


def batch_update(
    before: Sequence[RequestSamplingState], after: Sequence[RequestSamplingState], num_told: int
) -> BatchUpdate:
    """What leads from one list of rows to another.

    Newcomers first take the rows of those who left, then those behind; then rows are moved to where
    they belong, so that what a processor keeps for a sequence goes with it.

    `num_told`: rows that processors may know something of, of which `before` is all that's sure.
    """
    stays, known = set(map(id, after)), set(map(id, before))
    rows: list[RequestSamplingState | None] = [
        each if id(each) in stays else None for each in before
    ]
    rows += [None] * (max(num_told, len(after)) - len(rows))
    free = [row for row, each in enumerate(rows) if each is None]
    added: list[AddedRequest] = []
    for state in (each for each in after if id(each) not in known):
        row = free.pop(0)
        rows[row] = state
        prompt = list(state.prompt_token_ids) or None
        added.append((row, state.params, prompt, state.output_token_ids))
    removed = [row for row in reversed(free) if row < num_told]
    return BatchUpdate(len(after), removed, added, _moves(rows, after))


def _moves(
    rows: list[RequestSamplingState | None], after: Sequence[RequestSamplingState]
) -> list[MovedRequest]:
    """Moves that bring `rows` into the order of `after`."""
    place = {id(state): row for row, state in enumerate(rows) if state is not None}
    moves: list[MovedRequest] = []
    for target, state in enumerate(after):
        source, other = place[id(state)], rows[target]
        if source == target:
            continue
        alone = other is None
        direction = MoveDirectionality.UNIDIRECTIONAL if alone else MoveDirectionality.SWAP
        moves.append((source, target, direction))
        rows[source], rows[target] = other, state
        place[id(state)] = target
        if other is not None:
            place[id(other)] = source
    return moves
