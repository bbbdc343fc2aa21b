"""`BeamSearch`: chooses running and finished beams, given only tokens and log probabilities.

The algorithm is that of `transformers` (`GenerationMixin._beam_search`), so the same log
probabilities give the same outputs. Of all continuations of the beams the best `candidates_needed`
are considered: those among the first `width` that end become finished outputs, and the first
`width` that don't end become the new beams.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.contract.messages import TokenLogprobs
from engine.contract.sampling_params import SamplingParams


@dataclass(slots=True)
class Hypothesis:
    """A continuation of the prompt.

    Attributes:
        token_ids: [num output tokens]. entries: one per token, if requested: its log probability
            and the best alternatives.
        log_prob: sum of log probabilities. score: that over length ** length_penalty, once ended.
        by_length: whether it ended because it reached the maximum length.
    """

    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenLogprobs] = field(default_factory=list)
    log_prob: float = 0.0
    score: float = float("-inf")
    by_length: bool = False


class BeamStep(NamedTuple):
    """A beam of the next step: the beam that it continues, and the token."""

    parent: int
    token_id: int


class _Candidate(NamedTuple):
    log_prob: float
    parent: int
    rank: int  # among the parent's candidates


def candidates_needed(width: int, num_ends: int) -> int:
    """Return how many candidates per beam suffice for `width` that continue, even if every end
    token is among them.
    """
    return max(2, 1 + num_ends) * width


def end_tokens(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """Return the tokens that end an output: EOS unless ignored, and the stop token ids."""
    eos = () if params.ignore_eos else eos_token_ids
    return frozenset(eos) | frozenset(params.stop_token_ids or ())


class BeamSearch:
    """One beam search.

    Args:
        width: number of beams, at least 1.
        ends: tokens that end an output.
        max_tokens: maximum number of tokens of an output.
        length_penalty: exponent of the length in a score; above 0 favours long outputs.
        early_stopping: see `SamplingParams`.
        num_logprobs: number of alternatives in an output's entries; None: no entries.

    Attributes:
        running: the beams, most likely first.
        finished: ended outputs, best score first; at most `width`.
        done: whether the search is complete.
    """

    def __init__(
        self,
        width: int,
        ends: Collection[int],
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        num_logprobs: int | None = None,
    ) -> None:
        self.width = width
        self._ends = ends
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._num_logprobs = num_logprobs
        self.running = [Hypothesis()]
        self.finished: list[Hypothesis] = []
        self.done = False

    def advance(self, candidates: Sequence[TokenLogprobs]) -> list[BeamStep]:
        """Advance by one token.

        Args:
            candidates: for each running beam its `candidates_needed` best tokens, best first.

        Returns the beams of the next step, in the order of the new `running`; none when done.
        """
        length = len(self.running[0].token_ids) + 1
        best = self._best(candidates)
        full = length >= self._max_tokens
        can_extend = self._early_stopping is not True or len(self.finished) < self.width
        going: list[_Candidate] = []
        for rank, candidate in enumerate(best):
            token_id = candidates[candidate.parent].token_ids[candidate.rank]
            if not full and token_id not in self._ends:
                going.append(candidate)
            elif rank < self.width and can_extend:
                by_length = token_id not in self._ends
                self._finish(self._extend(candidate, candidates, by_length=by_length))
        going = going[: self.width]
        moves = [
            BeamStep(chosen.parent, candidates[chosen.parent].token_ids[chosen.rank])
            for chosen in going
        ]
        if going:
            self.running = [self._extend(chosen, candidates) for chosen in going]
        self.done = not going or not self._can_improve(length)
        return [] if self.done else moves

    def _best(self, candidates: Sequence[TokenLogprobs]) -> list[_Candidate]:
        """Return the most likely continuations of all beams together, best first."""
        every = [
            _Candidate(beam.log_prob + log_prob, parent, rank)
            for parent, (beam, beam_candidates) in enumerate(
                zip(self.running, candidates, strict=True)
            )
            for rank, log_prob in enumerate(beam_candidates.logprobs)
        ]
        every.sort(key=lambda candidate: -candidate.log_prob)
        return every[: candidates_needed(self.width, len(self._ends))]

    def _extend(
        self,
        candidate: _Candidate,
        candidates: Sequence[TokenLogprobs],
        *,
        by_length: bool = False,
    ) -> Hypothesis:
        parent, beam_candidates = self.running[candidate.parent], candidates[candidate.parent]
        entries = parent.entries
        if self._num_logprobs is not None:
            entries = [*entries, _entry(beam_candidates, candidate.rank, self._num_logprobs)]
        return Hypothesis(
            [*parent.token_ids, beam_candidates.token_ids[candidate.rank]],
            entries,
            candidate.log_prob,
            by_length=by_length,
        )

    def _finish(self, hypothesis: Hypothesis) -> None:
        """Keep an ended output if it is among the best `width`."""
        hypothesis.score = hypothesis.log_prob / len(hypothesis.token_ids) ** self._length_penalty
        self.finished.append(hypothesis)
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[self.width :]

    def outputs(self, count: int) -> list[Hypothesis]:
        """Return the best `count` outputs, best first. If the search has fewer, because few tokens
        are allowed, they are followed by unfinished beams, then by empty outputs.
        """
        if len(self.finished) < count:
            for beam in self.running if not self.finished and self.running[0].token_ids else ():
                beam.by_length = True
                self._finish(beam)
        missing = count - len(self.finished)
        return self.finished[:count] + [Hypothesis(by_length=True) for _ in range(missing)]

    def _can_improve(self, length: int) -> bool:
        """Whether further steps may improve the finished outputs."""
        if len(self.finished) < self.width:
            return True
        if self._early_stopping is True:
            return False
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_tokens
        best = self.running[0].log_prob / length**self._length_penalty
        return best > self.finished[-1].score


def _entry(candidates: TokenLogprobs, rank: int, count: int) -> TokenLogprobs:
    """Return a candidate's entry with the `count` best alternatives."""
    ids, values, ranks = candidates.token_ids, candidates.logprobs, candidates.ranks
    return TokenLogprobs(
        [ids[rank], *ids[:count]], [values[rank], *values[:count]], [ranks[rank], *ranks[:count]]
    )
