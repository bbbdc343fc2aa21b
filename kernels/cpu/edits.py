"""`RowEdits` as C++ reads them: arrays, and a table of their addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch

from kernels.cpu import structs as c
from kernels.cpu.checks import check_dense
from kernels.steps import RowEdits


class Edits:
    """The edits of a step's rows. Keeps the arrays that they point to.

    Raises ValueError for what doesn't fit together, and for a token that the vocabulary hasn't.

    Attributes:
        address: of the table.
        most: top tokens that a row is told of at most; -1: none is told of any.
    """

    def __init__(self, edits: Sequence[RowEdits], count: int, vocab_size: int) -> None:
        if len(edits) != count:
            raise ValueError(f"there must be edits for each of {count} rows")
        self._vocab_size = vocab_size
        self._kept: list[object] = [edits]
        self._table = (c.RowEdits * count)(*(self._row(each) for each in edits))
        self.address = ctypes.addressof(self._table)
        self.most = min(vocab_size, max((each.num_logprobs for each in edits), default=-1))

    def _row(self, edits: RowEdits) -> c.RowEdits:
        if edits.allowed is not None:
            check_dense("allowed", edits.allowed, (-(-self._vocab_size // 32),), torch.int32)
        if any(len(word) < 2 for word in edits.words):
            raise ValueError("a bad word must have two tokens or more")
        starts = [0]
        for word in edits.words:
            starts.append(starts[-1] + len(word))
        biases = (ctypes.c_float * len(edits.bias))(*edits.bias.values())
        self._kept.append(biases)
        return c.RowEdits(
            allowed=None if edits.allowed is None else edits.allowed.data_ptr(),
            forbidden=self._ids(edits.forbidden),
            num_forbidden=len(edits.forbidden),
            words=self._ids([token for word in edits.words for token in word]),
            word_starts=self._array(ctypes.c_int64, starts),
            num_words=len(edits.words),
            ends=self._ids(edits.ends),
            num_ends=len(edits.ends),
            min_tokens=edits.min_tokens,
            biased=self._ids(edits.bias),
            biases=ctypes.addressof(biases),
            num_biased=len(edits.bias),
            repetition=edits.repetition,
            frequency=edits.frequency,
            presence=edits.presence,
            counts_prompt=edits.counts_prompt,
            num_logprobs=edits.num_logprobs,
        )

    def _ids(self, tokens: Iterable[int]) -> int:
        known = list(tokens)
        if any(not 0 <= token < self._vocab_size for token in known):
            raise ValueError(f"tokens must be in [0, {self._vocab_size})")
        return self._array(ctypes.c_int32, known)

    def _array(self, of: type[ctypes.c_int32] | type[ctypes.c_int64], values: list[int]) -> int:
        array = (of * len(values))(*values)
        self._kept.append(array)
        return ctypes.addressof(array)
