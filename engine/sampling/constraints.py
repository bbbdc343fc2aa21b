"""Token constraints independent of grammars: allowed tokens, biases, bad words, min_tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.sampling.request_state import RequestSamplingState
from engine.sampling.token_bitmask import pack_bits
from kernels.logit_edits import LogitEdits
from kernels.tensors import to_device


class BadWords:
    """One sequence's bad words.

    Attributes:
        single: tokens that are bad words by themselves.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.single = [word[0] for word in words if len(word) == 1]
        #: Longer words by the token before their last one: at most one lookup per step.
        self._by_token: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            if len(word) > 1:
                entry = (list(word[:-1]), word[-1])
                self._by_token.setdefault(word[-2], []).append(entry)

    @property
    def has_longer(self) -> bool:
        """Whether any word has more than one token."""
        return bool(self._by_token)

    def banned_after(self, output: list[int]) -> list[int]:
        """Return tokens that would complete a word at the output's end."""
        if not output:
            return []
        return [
            last
            for prefix, last in self._by_token.get(output[-1], ())
            if output[-len(prefix) :] == prefix
        ]


class TokenIndex:
    """Indices of a [rows, vocab] tensor, collected in Python and used as one index.

    Args:
        vocab_size: tokens outside [0, vocab_size) are dropped: on a GPU an index out of range would
            abort all sequences, not only one.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[int] = []
        self._tokens: list[int] = []

    def add(self, row: int, tokens: Iterable[int]) -> list[int]:
        """Add a row's tokens; return those that weren't dropped."""
        valid = [token for token in tokens if 0 <= token < self._vocab_size]
        self._rows += [row] * len(valid)
        self._tokens += valid
        return valid

    def __len__(self) -> int:
        return len(self._rows)

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """([n] rows, [n] tokens), int64."""
        return (
            to_device(torch.tensor(self._rows, dtype=torch.int64), device),
            to_device(torch.tensor(self._tokens, dtype=torch.int64), device),
        )


MASKED_LOGIT = float("-inf")


def suppressed_stop_ids(state: RequestSamplingState, eos_token_ids: Sequence[int]) -> list[int]:
    """Return the tokens that must not end a sequence before `min_tokens`; none after that."""
    params = state.params
    if params.min_tokens <= len(state.output_token_ids):
        return []
    ends = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        ends.update(eos_token_ids)
    return sorted(ends)


class Constraints:
    """The constraints of a batch: combined once, applied in each step.

    Args:
        states: one per row of the logits.
        eos_token_ids: tokens that `min_tokens` forbids besides the stop token ids.
        edits: kernels that modify logits; None: use torch.
    """

    def __init__(
        self,
        states: Sequence[RequestSamplingState],
        eos_token_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
        edits: LogitEdits | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._edits = edits
        self._device = device
        self._stack_allowed(states)
        self._stack_banned(states)
        self._stack_bias(states)
        self._stack_min_tokens(states, eos_token_ids)

    @property
    def empty(self) -> bool:
        """Whether there are no constraints now or in later steps of the same batch."""
        return not (
            self._allowed or self._banned or self._bias or self._bad_words or self._min_tokens
        )

    @property
    def reads_outputs(self) -> bool:
        """Whether any constraint depends on the tokens generated so far."""
        return bool(self._bad_words or self._min_tokens)

    def _stack_allowed(self, states: Sequence[RequestSamplingState]) -> None:
        pairs, rows = TokenIndex(self._vocab_size), []
        for row, state in enumerate(states):
            if state.params.allowed_token_ids is not None:
                rows.append(row)
                pairs.add(row, state.params.allowed_token_ids)
        self._allowed = None
        if rows:
            stacked = to_device(torch.tensor(rows, dtype=torch.int64), self._device)
            self._allowed = stacked, pairs.index(self._device)
        if rows and self._edits is not None:
            bits = pack_bits(
                [states[row].params.allowed_token_ids or () for row in rows], self._vocab_size
            )
            self._allowed_bits = to_device(torch.from_numpy(bits), self._device)

    def _stack_banned(self, states: Sequence[RequestSamplingState]) -> None:
        """Add bad words of one token, which are always forbidden, unlike longer ones."""
        pairs = TokenIndex(self._vocab_size)
        self._bad_words: list[tuple[int, RequestSamplingState, BadWords]] = []
        for row, state in enumerate(states):
            if state.params.bad_words_token_ids:
                words = BadWords(state.params.bad_words_token_ids)
                pairs.add(row, words.single)
                if words.has_longer:
                    self._bad_words.append((row, state, words))
        self._banned = pairs.index(self._device) if len(pairs) else None

    def _stack_bias(self, states: Sequence[RequestSamplingState]) -> None:
        pairs, values = TokenIndex(self._vocab_size), []
        for row, state in enumerate(states):
            if bias := state.params.logit_bias:
                values += [float(bias[token]) for token in pairs.add(row, bias)]
        self._bias = None
        if values:
            tensor = to_device(torch.tensor(values, dtype=torch.float32), self._device)
            self._bias = (pairs.index(self._device), tensor)

    def _stack_min_tokens(
        self, states: Sequence[RequestSamplingState], eos_token_ids: Sequence[int]
    ) -> None:
        """Collect rows that must not end yet, with the tokens that would end them."""
        self._min_tokens: list[tuple[int, RequestSamplingState, list[int]]] = []
        for row, state in enumerate(states):
            if ends := suppressed_stop_ids(state, eos_token_ids):
                self._min_tokens.append((row, state, ends))
        self._early: tuple[Tensor, Tensor] | None = None
        self._early_rows: list[int] = []

    def apply(self, logits: Tensor) -> None:
        """Constrain `logits` ([rows, vocab], float32) in place."""
        if self._allowed is not None:
            self._keep(logits, *self._allowed)
        if self._banned is not None:
            self._mask_tokens(logits, self._banned)
        if self._bad_words:
            self._ban_completions(logits)
        if self._min_tokens:
            self._mask_stops_before_min_tokens(logits)
        if self._bias is not None:
            index, values = self._bias
            if self._edits is not None:
                self._edits.add_bias(logits, *index, values)
            else:
                logits.index_put_(index, values, accumulate=True)

    def _keep(self, logits: Tensor, rows: Tensor, index: tuple[Tensor, Tensor]) -> None:
        """For some rows, allow only the tokens at `index`."""
        if self._edits is not None:
            self._edits.apply_bitmask(logits, rows, self._allowed_bits, None)
            return
        allowed_logits = logits[index]
        logits[rows] = MASKED_LOGIT
        logits[index] = allowed_logits

    def _mask_tokens(self, logits: Tensor, index: tuple[Tensor, Tensor]) -> None:
        if self._edits is not None:
            self._edits.mask_tokens(logits, *index)
        else:
            logits[index] = MASKED_LOGIT

    def _ban_completions(self, logits: Tensor) -> None:
        pairs = TokenIndex(self._vocab_size)
        for row, state, words in self._bad_words:
            pairs.add(row, words.banned_after(state.output_token_ids))
        if len(pairs):
            self._mask_tokens(logits, pairs.index(self._device))

    def _mask_stops_before_min_tokens(self, logits: Tensor) -> None:
        """Forbid these tokens; the index is rebuilt only when a row reaches its min_tokens."""
        self._min_tokens = [
            entry
            for entry in self._min_tokens
            if len(entry[1].output_token_ids) < entry[1].params.min_tokens
        ]
        rows = [row for row, _, _ in self._min_tokens]
        if rows != self._early_rows:
            pairs = TokenIndex(self._vocab_size)
            for row, _, ends in self._min_tokens:
                pairs.add(row, ends)
            self._early_rows = rows
            self._early = pairs.index(self._device) if len(pairs) else None
        if self._early is not None and rows:
            self._mask_tokens(logits, self._early)
