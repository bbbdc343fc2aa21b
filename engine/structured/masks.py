"""Which tokens may come next: computed beside the forward pass, a bit a token."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.structured.backend import short
from engine.structured.grammar import GrammarState

#: Threads that fill a batch's rows. The forward pass wants the cores, too.
MAX_THREADS = 8


@dataclass(slots=True)
class MaskRow:
    """One sequence that gets a token from this step."""

    seq_id: int
    state: GrammarState
    ignore_eos: bool


@dataclass(slots=True)
class TokenMask:
    """The step's masks.

    Attributes:
        row_of: sequence -> row of `bits`.
        bits: int32 [rows, words]; bit t % 32 of word t // 32 is set where token t may come.
        only_eos: rows that nothing but EOS can follow: it comes whatever else the request says.
        errors: sequence -> why its grammar failed; its row forbids nothing.
    """

    row_of: dict[int, int]
    bits: NDArray[np.int32]
    only_eos: list[int] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)


class MaskMaker:
    """Fills a buffer that is used again each step: take a step's masks before the next begins."""

    def __init__(self, num_words: int, eos_token_ids: Sequence[int]) -> None:
        from llguidance import LLExecutor

        cores = len(os.sched_getaffinity(0))
        self._executor = LLExecutor(num_threads=min(MAX_THREADS, max(1, cores // 2)))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._buffer = np.zeros((0, num_words), dtype=np.int32)
        eos = np.zeros(num_words * 32, dtype=np.uint8)
        eos[list(eos_token_ids)] = 1
        self._eos = np.packbits(eos, bitorder="little").view(np.int32)

    def begin(self, rows: list[MaskRow]) -> Future[TokenMask]:
        """Start on the masks of a step. The rows' states mustn't move before they are there."""
        return self._thread.submit(self._make, rows)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)

    def _make(self, rows: list[MaskRow]) -> TokenMask:
        bits = self._rows(len(rows))
        self._executor.unsafe_compute_mask_ptr(
            [(row.state.matcher, at) for at, row in enumerate(rows)],
            bits.ctypes.data,
            bits.shape[1] * bits.itemsize,
            len(rows),
        )
        mask = TokenMask({row.seq_id: at for at, row in enumerate(rows)}, bits)
        more = np.any(bits & ~self._eos, axis=1)
        for at, row in enumerate(rows):
            if row.state.matcher.is_error():
                mask.errors[row.seq_id] = short(row.state.matcher.get_error())
                bits[at] = -1
            elif not more[at]:
                mask.only_eos.append(at)
            elif row.ignore_eos:
                bits[at] &= ~self._eos
        return mask

    def _rows(self, count: int) -> NDArray[np.int32]:
        if count > len(self._buffer):
            self._buffer = np.zeros((2 * count, self._buffer.shape[1]), dtype=np.int32)
        return self._buffer[:count]
