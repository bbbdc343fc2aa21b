"""`Drafter`: how many drafts each row of a step gets."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.contract.speculative import SpeculativeConfig
from engine.scheduler import Sequence, StepPlan
from engine.speculative.chances import Chances, UsualChances
from engine.speculative.draft_maker import DraftMaker
from engine.speculative.proposers import PROPOSERS, Proposer
from engine.speculative.step_costs import StepCosts
from engine.speculative.watch import Watch

Possible = Callable[[Sequence, list[int]], list[int]]
#: Drafts must promise so many times the tokens per second: what is measured is never exact.
_WORTH = 1.03
#: One step in so many goes without, to see what it takes: of those in which drafts promise less
#: than so many times the tokens per second, and of others.
_SURE, _PLAIN_UNSURE, _PLAIN = 1.2, 6, 48
#: The part of steps' time that may go into looking for drafts of which it's known only that they'd
#: pay if all held.
_LOOKS = 0.004


@dataclass(slots=True)
class _Row:
    """A sequence that had drafts; `matched`: see `Guess`, of the newest ones."""

    sequence: Sequence
    chances: Chances
    matched: int = 0


class Drafter:
    """Gives drafts to the rows where they promise the most tokens for the step's time.

    A draft brings as many tokens as it is likely to hold with all those before it (`Chances`); a
    step that is one token wider takes longer by what `StepCosts` knows, and what a `DraftMaker`
    takes comes before it. Drafts are added, the likeliest first, up to where tokens per second are
    highest. In a full batch, where a wider step takes as much longer, none are, and none are looked
    for. Where they'd pay if more of them held than is expected, some are looked for now and then
    and compared with what comes (`Watch`).
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        max_model_len: int,
        possible: Possible | None = None,
        model: DraftMaker | None = None,
    ) -> None:
        """`possible`: cuts a sequence's drafts to those that what it follows allows; `model`: who
        computes drafts, where they don't come from text.
        """
        self._config = config
        self._possible = possible or (lambda sequence, drafts: drafts)
        self._max_model_len = max_model_len
        self.model = model
        self._proposer: Proposer | None = None
        if model is None:
            self._proposer = PROPOSERS[config.method](config)
        self._rows: dict[int, _Row] = {}
        self._usual = self._unknown_chances()
        self._watch = Watch()
        #: Of looking for drafts: a row's seconds on average, those since the last step, and steps
        #: since the last look.
        self._look_seconds, self._looked, self._unseen = 0.0, 0.0, 0
        self._drafted = 0
        #: While steps are timed a draft model draws whether that pays or not.
        self.timing = False
        self.costs = StepCosts(pace=None if model is None else model.costs.pace)

    def propose(self, decoding: list[Sequence], room: int) -> dict[int, list[int]]:
        """Drafts by sequence id.

        Args:
            decoding: the rows of the step that decode.
            room: most drafts of the step.
        """
        for checked in self._watch.take_checked():
            row = self._row(checked.sequence)
            row.chances.note(checked.matched, checked.num_drafts, checked.num_accepted)
        self._forget_those_that_left()
        width = len(decoding)
        most = min(room, self.costs.most - width)
        off = 0 < self._config.disable_by_batch_size <= width
        if off or not decoding or most < 1:
            return {}
        hope = max(self._row(each).chances.best() for each in decoding)
        if self._is_timed or self._may_pay(width, most, hope):
            if self.model is not None:
                return self._drawn(self.model, decoding, most)
            return self._found(decoding, most)
        for sequence in decoding:
            self._row(sequence).chances.drift()
        self._unseen += 1
        if self._may_look(width, most):
            self._look(decoding)
        return {}

    @property
    def _is_timed(self) -> bool:
        return self.timing and self.model is not None

    def _found(self, decoding: list[Sequence], most: int) -> dict[int, list[int]]:
        """Drafts from text: all that there are, then as many of them as pay."""
        proposed = self._look(decoding)
        counts = self._worth(
            {seq_id: len(drafts) for seq_id, drafts in proposed.items()}, len(decoding), most
        )
        for seq_id in counts:
            self._watch.drop(seq_id)
        return {seq_id: proposed[seq_id][:count] for seq_id, count in counts.items()}

    def _look(self, decoding: list[Sequence]) -> dict[int, list[int]]:
        """Drafts that there are, by sequence id; all are watched."""
        started, proposed = time.perf_counter(), {}
        for sequence in decoding:
            count = self._most(sequence)
            if count > 0 and self._proposer is not None:
                guess = self._proposer.propose(sequence, count)
                if guess.tokens and (drafts := self._possible(sequence, guess.tokens)):
                    self._row(sequence).matched = guess.matched
                    if sequence.seq_id not in self._watch:
                        self._watch.add(sequence, guess.matched, drafts)
                    proposed[sequence.seq_id] = drafts
        self._looked = time.perf_counter() - started
        self._look_seconds += 0.1 * (self._looked / len(decoding) - self._look_seconds)
        self._unseen = 0
        return proposed

    def _may_look(self, width: int, most: int) -> bool:
        """Whether drafts could pay if all held, and looking for them costs next to nothing."""
        if self.model is not None or not self._may_pay(width, most, 1.0):
            return False
        return width * self._look_seconds <= _LOOKS * self._unseen * self.costs.seconds(width)

    def _drawn(
        self, model: DraftMaker, decoding: list[Sequence], most: int
    ) -> dict[int, list[int]]:
        """Drafts of a model, which cost: first as many as pay, and then these are drawn."""
        if not model.works:
            return {}
        possible = {}
        for sequence in decoding:
            count = min(self._most(sequence), model.longest(sequence))
            if count > 0 and model.takes(sequence):
                self._row(sequence)
                possible[sequence.seq_id] = count
        counts = self._worth(possible, len(decoding), most)
        rows = {sequence.seq_id: sequence for sequence in decoding}
        drawn = model.propose([(rows[seq_id], count) for seq_id, count in counts.items()])
        found = {seq_id: self._possible(rows[seq_id], drafts) for seq_id, drafts in drawn.items()}
        return {seq_id: drafts for seq_id, drafts in found.items() if drafts}

    def note(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """A row's drafts were checked."""
        self._watch.drop(sequence.seq_id)
        row = self._row(sequence)
        row.chances.note(row.matched, num_drafts, num_accepted)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """A step was run; the seconds of a draft model's steps before it are no part of it."""
        if self.model is not None:
            seconds -= self.model.seconds
            self.model.seconds = 0.0
        seconds, self._looked = seconds - self._looked, 0.0
        if not plan.num_prompt_tokens and plan.seq_ids:
            self.costs.note(plan.num_tokens, seconds)

    def reset(self, *, worker_too: bool = False) -> None:
        """Forget what a draft model has cached; `worker_too`: its memory was given back."""
        if self.model is not None:
            self.model.reset(worker_too=worker_too)

    def start_over(self) -> None:
        """Forget what was said and what held so far, but not what steps take."""
        self._rows, self._usual, self._watch = {}, self._unknown_chances(), Watch()
        if self.model is None:
            self._proposer = PROPOSERS[self._config.method](self._config)

    def _unknown_chances(self) -> UsualChances:
        return UsualChances(self._config.prompt_lookup_max if self.model is None else 0)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless a draft model's pool is in order."""
        if self.model is not None:
            self.model.check_integrity()

    def _row(self, sequence: Sequence) -> _Row:
        row = self._rows.get(sequence.seq_id)
        if row is None:
            row = _Row(sequence, Chances(self._usual, sequence.request.message.tenant))
            self._rows[sequence.seq_id] = row
        return row

    def _most(self, sequence: Sequence) -> int:
        """Drafts that a sequence can use: a step gives one token more than drafts hold."""
        left = sequence.max_output_tokens - sequence.num_output_tokens
        capped = sequence.request.tokens_left
        if capped is not None:
            left = min(left, capped)
        left = min(left, self._max_model_len - sequence.num_tokens)
        return min(self._config.num_speculative_tokens, left - 1) if takes_drafts(sequence) else 0

    def _may_pay(self, width: int, most: int, hope: float) -> bool:
        """Whether drafts could pay if each of them held so likely."""
        seconds, count = self.costs.seconds, min(most, width * self._config.num_speculative_tokens)
        now = _WORTH * width / seconds(width)
        deepest = -(-count // max(1, width))
        looking = width * self._look_seconds
        return any(
            (width + hope * more)
            / (seconds(width + more) + looking + self._drawing(depth, min(more, width)))
            > now
            for more, depth in ((1, 1), (count, deepest))
        )

    def _drawing(self, depth: int, rows: int) -> float:
        """Seconds that a draft model takes to draw so many drafts for each of `rows`."""
        return 0.0 if self.model is None else depth * self.model.costs.seconds(rows)

    def _worth(self, possible: dict[int, int], width: int, most: int) -> dict[int, int]:
        """How many drafts pay, by sequence id, of the first `possible` ones of each."""
        promised = sorted(
            (
                (chance, -place, seq_id)
                for seq_id, count in possible.items()
                for place, chance in enumerate(self._promised(seq_id, count))
            ),
            reverse=True,
        )[:most]
        now = width / self.costs.at_best(width)
        tokens, best, taken = float(width), _WORTH * now, 0
        depth, rows = 0, set()
        for count, (chance, place, seq_id) in enumerate(promised, 1):
            tokens += chance
            depth = max(depth, 1 - place)
            rows.add(seq_id)
            rate = tokens / (self.costs.at_worst(width + count) + self._drawing(depth, len(rows)))
            if rate > best:
                best, taken = rate, count
        if self._is_timed:
            taken = len(promised)
        elif taken:
            self._drafted += 1
            often = _PLAIN_UNSURE if best < _SURE * now else _PLAIN
            taken = 0 if self._drafted % often == 0 else taken
        counts: dict[int, int] = {}
        for _, _, seq_id in promised[:taken]:
            counts[seq_id] = counts.get(seq_id, 0) + 1
        for seq_id in possible.keys() - counts.keys():
            self._rows[seq_id].chances.drift()
        return counts

    def _promised(self, seq_id: int, count: int) -> list[float]:
        """The tokens that each of a row's drafts brings."""
        row = self._rows[seq_id]
        return row.chances.at_worst(row.matched, count)

    def _forget_those_that_left(self) -> None:
        for seq_id, row in list(self._rows.items()):
            if row.sequence.finished:
                del self._rows[seq_id]
                self._watch.drop(seq_id)
                if (source := self.model or self._proposer) is not None:
                    source.forget(row.sequence)


def takes_drafts(sequence: Sequence) -> bool:
    """Whether a sequence's drafts can be checked: nothing but its own draws chooses its tokens."""
    beams = sequence.request.message.sampling.use_beam_search
    return not (beams or sequence.wants_prompt_logprobs)
