"""Drafts of somebody who knows what will be said."""

from __future__ import annotations

import random
from collections.abc import Iterable

from engine.contract.speculative_config import SpeculativeConfig
from engine.scheduler import Sequence
from engine.speculative.ngram import Proposal, Proposer
from tests.engine.models import VOCAB


class Seer(Proposer):
    """Knows what the sequences will say, and sometimes lies."""

    texts: dict[tuple[int, ...], list[list[int]]]
    rng: random.Random

    def __init__(self, config: SpeculativeConfig) -> None:
        pass

    def propose(self, sequence: Sequence, count: int) -> Proposal:
        tokens = sequence.token_ids
        prompt, output = tokens[: sequence.num_prompt_tokens], tokens[sequence.num_prompt_tokens :]
        for text in self.texts.get(tuple(prompt), []):
            if text[: len(output)] == output:
                drafts = text[len(output) : len(output) + count]
                return self._guess(
                    self.rng.randrange(4, VOCAB) if self.rng.random() < 0.15 else draft
                    for draft in drafts
                )
        return self._guess(self.rng.randrange(4, VOCAB) for _ in range(count))

    @staticmethod
    def _guess(tokens: Iterable[int]) -> Proposal:
        return Proposal(list(tokens), 4)

    def forget(self, sequence: Sequence) -> None:
        pass
