"""What forbids or favours tokens whatever the output: lists, biases, bad words, min_tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampling.bad_words import BadWords
from engine.sampling.pairs import Pairs
from engine.sampling.state import SequenceSampling

NEVER = float("-inf")


class Constraints:
    """The constraints of a batch: stacked once, applied each step.

    Args:
        states: one a row of the logits.
        eos_token_ids: what `min_tokens` holds back besides the stop token ids.
    """

    def __init__(
        self,
        states: Sequence[SequenceSampling],
        eos_token_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._stack_allowed(states)
        self._stack_banned(states)
        self._stack_bias(states)
        self._stack_min_tokens(states, eos_token_ids)

    @property
    def empty(self) -> bool:
        """Whether there's nothing to do, now or later, while the batch stays as it is."""
        return not (
            self._allowed or self._banned or self._bias or self._bad_words or self._min_tokens
        )

    def _stack_allowed(self, states: Sequence[SequenceSampling]) -> None:
        pairs, rows = Pairs(self._vocab_size), []
        for row, state in enumerate(states):
            if state.params.allowed_token_ids is not None:
                rows.append(row)
                pairs.add(row, state.params.allowed_token_ids)
        whole = torch.tensor(rows, dtype=torch.int64, device=self._device)
        self._allowed = (whole, pairs.index(self._device)) if rows else None

    def _stack_banned(self, states: Sequence[SequenceSampling]) -> None:
        """Bad words of one token always hold; longer ones depend on the output."""
        pairs = Pairs(self._vocab_size)
        self._bad_words: list[tuple[int, SequenceSampling, BadWords]] = []
        for row, state in enumerate(states):
            if state.params.bad_words_token_ids:
                words = BadWords(state.params.bad_words_token_ids)
                pairs.add(row, words.single)
                if words.has_longer:
                    self._bad_words.append((row, state, words))
        self._banned = pairs.index(self._device) if len(pairs) else None

    def _stack_bias(self, states: Sequence[SequenceSampling]) -> None:
        pairs, values = Pairs(self._vocab_size), []
        for row, state in enumerate(states):
            bias = state.params.logit_bias or {}
            values += [float(bias[token]) for token in pairs.add(row, bias)]
        self._bias = None
        if values:
            tensor = torch.tensor(values, dtype=torch.float32, device=self._device)
            self._bias = (pairs.index(self._device), tensor)

    def _stack_min_tokens(
        self, states: Sequence[SequenceSampling], eos_token_ids: Sequence[int]
    ) -> None:
        """Rows that may not end yet, with the tokens that would end them."""
        self._min_tokens: list[tuple[int, SequenceSampling, list[int]]] = []
        for row, state in enumerate(states):
            params = state.params
            if params.min_tokens <= len(state.output_token_ids):
                continue
            ends = set(params.stop_token_ids or ())
            if not params.ignore_eos:
                ends.update(eos_token_ids)
            if ends:
                self._min_tokens.append((row, state, sorted(ends)))
        self._early: tuple[Tensor, Tensor] | None = None
        self._early_rows: list[int] = []

    def apply(self, logits: Tensor) -> None:
        """Constrain `logits` ([rows, vocab], float32) in place."""
        if self._allowed is not None:
            whole, index = self._allowed
            kept = logits[index]
            logits[whole] = NEVER
            logits[index] = kept
        if self._banned is not None:
            logits[self._banned] = NEVER
        if self._bad_words:
            self._ban_completions(logits)
        if self._min_tokens:
            self._ban_early_ends(logits)
        if self._bias is not None:
            index, values = self._bias
            logits.index_put_(index, values, accumulate=True)

    def _ban_completions(self, logits: Tensor) -> None:
        pairs = Pairs(self._vocab_size)
        for row, state, words in self._bad_words:
            pairs.add(row, words.banned_after(state.output_token_ids))
        if len(pairs):
            logits[pairs.index(self._device)] = NEVER

    def _ban_early_ends(self, logits: Tensor) -> None:
        """The index is made anew only when a row has reached its min_tokens."""
        self._min_tokens = [
            entry
            for entry in self._min_tokens
            if len(entry[1].output_token_ids) < entry[1].params.min_tokens
        ]
        rows = [row for row, _, _ in self._min_tokens]
        if rows != self._early_rows:
            pairs = Pairs(self._vocab_size)
            for row, _, ends in self._min_tokens:
                pairs.add(row, ends)
            self._early_rows = rows
            self._early = pairs.index(self._device) if len(pairs) else None
        if self._early is not None and rows:
            logits[self._early] = NEVER
