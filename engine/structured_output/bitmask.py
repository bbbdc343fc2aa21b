"""Bitmasks of allowed next tokens; computed during the forward pass if they take long."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.contract.reasoning import ReasoningPhase
from engine.scheduler.plan import GrammarOutput
from engine.structured_output.backend_llguidance import short
from engine.structured_output.grammar import GrammarState, GrammarVocabulary

#: Threads that fill a batch's rows. The forward pass needs cores, too.
MAX_THREADS = 8
#: Seconds below which masks are computed synchronously: waking a thread costs more.
INLINE_BUDGET_S = 150e-6
#: Weight of a row's previous duration in its estimate, one step later.
_MEMORY = 0.95


@dataclass(slots=True)
class BitmaskRow:
    """A row of a step that gets a token: a sequence's newest token, or a draft after it."""

    seq_id: int
    state: GrammarState
    ignore_eos: bool
    drafted: bool = False


class BitmaskBuilder:
    """Computes the masks of one step after the other, in a thread unless they take little time."""

    def __init__(self, num_words: int, eos_token_ids: Sequence[int]) -> None:
        from llguidance import LLExecutor

        cores = len(os.sched_getaffinity(0))
        self._executor = LLExecutor(num_threads=min(MAX_THREADS, max(1, cores // 2)))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._buffer = np.zeros((0, num_words), dtype=np.int32)
        #: The vocabulary for rows whose adapter adds no tokens.
        self._models = GrammarVocabulary(num_words, eos_token_ids)
        #: The longest recent duration of a row.
        self._row_s = INLINE_BUDGET_S
        self._last: Future[GrammarOutput] | None = None

    def begin(self, step: int, rows: list[BitmaskRow]) -> Future[GrammarOutput]:
        """Start computing a step's masks. The rows' states mustn't change before they are
        complete.
        """
        if len(rows) * self._row_s < INLINE_BUDGET_S and (self._last is None or self._last.done()):
            future: Future[GrammarOutput] = Future()
            try:
                future.set_result(self._make(step, rows))
            except Exception as error:  # as from the thread: passed on to the waiting caller
                future.set_exception(error)
            return future
        self._last = self._thread.submit(self._make, step, rows)
        return self._last

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False)

    def _make(self, step: int, rows: list[BitmaskRow]) -> GrammarOutput:
        began = time.perf_counter()
        output = self._output(step, rows)
        took = (time.perf_counter() - began) / len(rows)
        self._row_s = max(took, _MEMORY * self._row_s)
        return output

    def _output(self, step: int, rows: list[BitmaskRow]) -> GrammarOutput:
        spaces = [row.state.space or self._models for row in rows]
        bits = self._rows(len(rows), max(space.num_words for space in spaces))
        eos = _eos_of(spaces, bits.shape[1])
        output = GrammarOutput(step, [row.seq_id for row in rows])
        followed = [index for index, row in enumerate(rows) if self._follows(row.state)]
        self._fill(rows, followed, spaces, bits)
        self._expand_added_tokens(rows, followed, spaces, bits)
        more = np.any(bits & ~eos, axis=1)
        for index in followed:
            row, matcher = rows[index], rows[index].state.matcher
            if matcher is not None and matcher.is_error():
                if not row.drafted:  # else it comes again once the sequence is there
                    output.errors[row.seq_id] = short(matcher.get_error())
                bits[index] = -1
            elif not more[index]:
                output.eos_only_sequences.append(index)
            elif row.ignore_eos:
                bits[index] &= ~eos[index]
        for index, row in enumerate(rows):
            self._add_thinking(row.state, bits[index], eos[index])
        output.bits = bits.tobytes()
        return output

    @staticmethod
    def _follows(state: GrammarState) -> bool:
        """Whether the grammar restricts the next token: the reasoning is over, or must not
        begin.
        """
        if state.matcher is None or state.thinking is None:
            return state.matcher is not None
        first = state.phase is ReasoningPhase.START and state.thinking.forced_token is None
        return first or state.phase is ReasoningPhase.PAST

    def _fill(
        self,
        rows: list[BitmaskRow],
        followed: list[int],
        spaces: list[GrammarVocabulary],
        bits: NDArray[np.int32],
    ) -> None:
        """The grammars' masks; the other rows allow all tokens."""
        if len(followed) < len(rows):
            bits[:] = -1
        widths: dict[int, list[int]] = {}
        for index in followed:
            widths.setdefault(spaces[index].num_words, []).append(index)
        for width, indexes in widths.items():
            if width == bits.shape[1]:
                self._compute(rows, indexes, indexes, bits)
                continue
            narrow = np.zeros((len(indexes), width), dtype=np.int32)
            self._compute(rows, indexes, range(len(indexes)), narrow)
            bits[indexes, :width], bits[indexes, width:] = narrow, 0

    @staticmethod
    def _expand_added_tokens(
        rows: list[BitmaskRow],
        followed: list[int],
        spaces: list[GrammarVocabulary],
        bits: NDArray[np.int32],
    ) -> None:
        """Fix rows that allow only a special token which their grammar doesn't accept.

        If only one text can follow, the backend allows its tokenization, which may contain a
        special token, although the grammar doesn't treat special tokens as text.
        """
        for index in followed:
            space = spaces[index]
            row, matcher = bits[index, : space.num_words], rows[index].state.matcher
            only = _only(row)
            if matcher is None or only not in space.special:
                continue
            if matcher.is_error() or matcher.is_stopped() or matcher.validate_tokens([only]):
                continue
            first = space.expand(matcher.compute_ff_bytes())
            if first is not None:
                row[:] = 0
                _allow(row, first)

    def _compute(
        self,
        rows: list[BitmaskRow],
        followed: list[int],
        targets: Sequence[int],
        bits: NDArray[np.int32],
    ) -> None:
        """Copy the masks of the rows `followed` to the rows `targets` of `bits`, of the same
        width.
        """
        if len(followed) == 1 and (matcher := rows[followed[0]].state.matcher):
            row = bits[targets[0]]
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        elif followed:
            matchers = [
                (rows[index].state.matcher, target) for index, target in zip(followed, targets)
            ]
            self._executor.unsafe_compute_mask_ptr(
                [(matcher, target) for matcher, target in matchers if matcher is not None],
                bits.ctypes.data,
                bits.shape[1] * bits.itemsize,
                len(bits),
            )

    def _add_thinking(
        self, state: GrammarState, row: NDArray[np.int32], eos: NDArray[np.int32]
    ) -> None:
        """Apply the reasoning to a row: allow its start and its forced end, forbid EOS within."""
        thinking = state.thinking
        if thinking is None or thinking.phase is ReasoningPhase.PAST:
            return
        forced = thinking.forced_token
        if forced is not None:
            row[:] = 0
            _allow(row, forced)
        elif thinking.phase is ReasoningPhase.START:
            _allow(row, thinking.params.start[0])
        elif state.matcher is not None:
            row &= ~eos

    def _rows(self, count: int, words: int) -> NDArray[np.int32]:
        if count > len(self._buffer) or words != self._buffer.shape[1]:
            self._buffer = np.zeros((2 * count, words), dtype=np.int32)
        return self._buffer[:count]


def _eos_of(spaces: list[GrammarVocabulary], words: int) -> NDArray[np.int32]:
    """int32 [rows, words]: mask of the tokens that end an output, for each row."""
    if all(space is spaces[0] for space in spaces):
        return np.broadcast_to(spaces[0].eos_bits, (len(spaces), words))
    eos = np.zeros((len(spaces), words), dtype=np.int32)
    for row, space in zip(eos, spaces, strict=True):
        row[: space.num_words] = space.eos_bits
    return eos


def _only(row: NDArray[np.int32]) -> int:
    """The only allowed token; -1: there are several, or none."""
    words = np.flatnonzero(row)
    if len(words) != 1:
        return -1
    word = int(row.view(np.uint32)[words[0]])
    return -1 if word & (word - 1) else 32 * int(words[0]) + word.bit_length() - 1


def _allow(row: NDArray[np.int32], token: int) -> None:
    row.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))
