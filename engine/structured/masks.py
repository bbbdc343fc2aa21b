"""Which tokens may come next, a bit a token: computed beside the forward pass if they take long."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.contract.thinking import Phase
from engine.scheduler.plan import GrammarOutput
from engine.structured.backend import short
from engine.structured.grammar import GrammarState

#: Threads that fill a batch's rows. The forward pass wants the cores, too.
MAX_THREADS = 8
#: Masks that take less than this are made where they are asked for: waking a thread costs more.
QUICK_S = 150e-6
#: How much of what a row once took is still expected of one a step later.
_MEMORY = 0.95


@dataclass(slots=True)
class MaskRow:
    """A place of a step that gets a token: a sequence's newest one, or a draft behind it."""

    seq_id: int
    state: GrammarState
    ignore_eos: bool
    drafted: bool = False


class MaskMaker:
    """Makes the masks of one step after the other, in a thread unless they are quickly made."""

    def __init__(self, num_words: int, eos_token_ids: Sequence[int]) -> None:
        from llguidance import LLExecutor

        cores = len(os.sched_getaffinity(0))
        self._executor = LLExecutor(num_threads=min(MAX_THREADS, max(1, cores // 2)))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._buffer = np.zeros((0, num_words), dtype=np.int32)
        eos = np.zeros(num_words * 32, dtype=np.uint8)
        eos[list(eos_token_ids)] = 1
        self._eos = np.packbits(eos, bitorder="little").view(np.int32)
        #: The longest that a row took lately.
        self._row_s = QUICK_S
        self._last: Future[GrammarOutput] | None = None

    def begin(self, step: int, rows: list[MaskRow]) -> Future[GrammarOutput]:
        """Start on the masks of a step. The rows' states mustn't move before they are there."""
        if len(rows) * self._row_s < QUICK_S and (self._last is None or self._last.done()):
            made: Future[GrammarOutput] = Future()
            try:
                made.set_result(self._make(step, rows))
            except Exception as error:  # as from the thread: whoever waits is told
                made.set_exception(error)
            return made
        self._last = self._thread.submit(self._make, step, rows)
        return self._last

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)

    def _make(self, step: int, rows: list[MaskRow]) -> GrammarOutput:
        began = time.perf_counter()
        output = self._output(step, rows)
        took = (time.perf_counter() - began) / len(rows)
        self._row_s = max(took, _MEMORY * self._row_s)
        return output

    def _output(self, step: int, rows: list[MaskRow]) -> GrammarOutput:
        bits = self._rows(len(rows))
        output = GrammarOutput(step, [row.seq_id for row in rows])
        followed = [at for at, row in enumerate(rows) if self._follows(row.state)]
        self._fill(rows, followed, bits)
        more = np.any(bits & ~self._eos, axis=1)
        for at in followed:
            row, matcher = rows[at], rows[at].state.matcher
            if matcher is not None and matcher.is_error():
                if not row.drafted:  # else it comes again once the sequence is there
                    output.errors[row.seq_id] = short(matcher.get_error())
                bits[at] = -1
            elif not more[at]:
                output.only_eos.append(at)
            elif row.ignore_eos:
                bits[at] &= ~self._eos
        for at, row in enumerate(rows):
            self._add_thinking(row.state, bits[at])
        output.bits = bits.tobytes()
        return output

    @staticmethod
    def _follows(state: GrammarState) -> bool:
        """Whether the grammar says what may come next: the reasoning is over, or may not begin."""
        if state.matcher is None or state.thinking is None:
            return state.matcher is not None
        first = state.phase is Phase.START and state.thinking.forced_token is None
        return first or state.phase is Phase.PAST

    def _fill(self, rows: list[MaskRow], followed: list[int], bits: NDArray[np.int32]) -> None:
        """The grammars' masks; the other rows allow everything."""
        if len(followed) < len(rows):
            bits[:] = -1
        if len(followed) == 1 and (matcher := rows[followed[0]].state.matcher):
            row = bits[followed[0]]
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        elif followed:
            self._executor.unsafe_compute_mask_ptr(
                [(matcher, at) for at in followed if (matcher := rows[at].state.matcher)],
                bits.ctypes.data,
                bits.shape[1] * bits.itemsize,
                len(rows),
            )

    def _add_thinking(self, state: GrammarState, row: NDArray[np.int32]) -> None:
        """What the reasoning adds to a row: its own beginning and end, and no EOS within."""
        thinking = state.thinking
        if thinking is None or thinking.phase is Phase.PAST:
            return
        forced = thinking.forced_token
        if forced is not None:
            row[:] = 0
            _allow(row, forced)
        elif thinking.phase is Phase.START:
            _allow(row, thinking.params.start[0])
        elif state.matcher is not None:
            row &= ~self._eos

    def _rows(self, count: int) -> NDArray[np.int32]:
        if count > len(self._buffer):
            self._buffer = np.zeros((2 * count, self._buffer.shape[1]), dtype=np.int32)
        return self._buffer[:count]


def _allow(row: NDArray[np.int32], token: int) -> None:
    """Set a token's bit."""
    row.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))
