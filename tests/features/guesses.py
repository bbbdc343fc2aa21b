"""Drafts that mostly hold: whoever guesses knows what will be said, and sometimes lies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from engine.contract.speculative_config import SpeculativeConfig
from engine.scheduler import Sequence
from engine.speculative import drafter
from engine.speculative.loss_bound import LossBound
from engine.speculative.ngram import Proposal, Proposer
from engine.speculative.step_times import StepTimes
from tests.engine.models import VOCAB
from tests.features.workload import Outputs


class Guesses(Proposer):
    """The only source of drafts while `guessing`."""

    _outputs: dict[int, list[list[int]]] = {}
    _rng = random.Random(7)

    def __init__(self, config: SpeculativeConfig | None = None) -> None:
        pass

    def know(self, outputs: Outputs) -> None:
        """What requests get without drafts."""
        answer: dict[int, list[list[int]]] = {}
        for (number, _), output in outputs.items():
            answer.setdefault(number, []).append(output.tokens)
        type(self)._outputs = answer

    def propose(self, sequence: Sequence, count: int) -> Proposal:
        number = int(sequence.request.request_id.rpartition("-")[2])
        had = sequence.token_ids[sequence.num_prompt_tokens :]
        rng = self._rng
        for text in self._outputs.get(number, []):
            if text[: len(had)] == had:
                drafts = text[len(had) : len(had) + count]
                drafts_or_noise = [
                    rng.randrange(4, VOCAB) if rng.random() < 0.15 else d for d in drafts
                ]
                return Proposal(drafts_or_noise, 4)
        return Proposal([rng.randrange(4, VOCAB) for _ in range(count)], 4)

    def forget(self, sequence: Sequence) -> None:
        pass


@contextmanager
def guessing() -> Iterator[Guesses]:
    """As if wider steps were free, whatever this machine measures."""
    with (
        mock.patch.object(StepTimes, "record"),
        mock.patch.object(StepTimes, "widest", 10**6),
        mock.patch.object(LossBound, "budget", return_value=1e9),
        mock.patch.object(LossBound, "can_look_up", return_value=True),
        mock.patch.object(LossBound, "can_read", return_value=True),
        mock.patch.object(LossBound, "can_draft", return_value=True),
        mock.patch.dict(drafter.PROPOSERS, {"ngram": Guesses}),
    ):
        yield Guesses()
