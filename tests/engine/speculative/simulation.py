"""An engine's time, simulated: what drafts bring where each step takes what a table says.

Nothing is timed. A clock stands still but for what the tables add to it: steps by their width, a
draft model's steps by their rows, a look for drafts in text by its rows. Texts say how often the
next token is the one that was guessed.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from engine.contract.sampling_params import SamplingParams
from engine.contract.speculative_config import SpeculativeConfig
from engine.scheduler import NewSequence, Sequence, SequenceStatus, StepPlan
from engine.speculative.drafter import Drafter
from engine.speculative.head_tracking import HeadTracking
from engine.speculative.ngram import Proposal, Proposer
from engine.speculative.step_times import StepTimes
from tests.engine.speculative.test_proposers import sequence

CONFIG = SpeculativeConfig(method="ngram", num_speculative_tokens=8)
_RIGHT, _MISMATCH = 1, 2
Cost = Callable[[int], float]
#: The chance that a row's next token is the one guessed, by the number of the step and the row.
Text = Callable[[int, Sequence], float]


class Follows(NamedTuple):
    """A head reads sequences along: seconds that it takes a row in each step, those of a prompt,
    and what it takes to follow that.
    """

    row: float
    prompt: float
    more: float


def line(*points: tuple[int, float]) -> Cost:
    """Seconds by width as lines go between points, and on as between the last two."""
    widths = [width for width, _ in points]

    def cost(width: int) -> float:
        index = min(max(bisect_left(widths, width), 1), len(points) - 1)
        (low, less), (high, more) = points[index - 1], points[index]
        return less + (more - less) * (width - low) / (high - low)

    return cost


@dataclass(slots=True)
class Spent:
    """Seconds and tokens of a run, and what its tokens had taken without drafts."""

    seconds: float = 0.0
    tokens: int = 0
    baseline_s: float = 0.0

    @property
    def speed_up(self) -> float:
        """Tokens a second through those without drafts."""
        return self.baseline_s / self.seconds


class _Guessing(Proposer):
    """Finds something for so many of all rows, in `seconds` a row."""

    def __init__(self, owner: Simulation, finds: float, seconds: float) -> None:
        self._owner, self._finds, self._seconds = owner, finds, seconds

    def propose(self, sequence: Sequence, count: int) -> Proposal:
        """See the base."""
        self._owner.now += self._seconds
        if self._owner.rng.random() < self._finds:
            return Proposal([_RIGHT] * count, 3)
        return Proposal([], 0)

    def forget(self, sequence: Sequence) -> None:
        """See the base."""


class _Model:
    """Stands for a draft model, whose steps take what a table says."""

    is_healthy, seconds, reading = True, 0.0, 0.0

    def __init__(
        self, owner: Simulation, cost: Cost, lookup_s: float, prompt: float, *, follows: bool
    ) -> None:
        self._owner, self._cost, self._lookup_s = owner, cost, lookup_s
        self._prompt, self._seen_ids = prompt, set[int]()
        self.costs = StepTimes(is_draft=True)
        self.following = HeadTracking(0.0) if follows else None

    def supports(self, sequence: Sequence) -> bool:
        """Whoever asks looks at the row."""
        self._owner.now += self._lookup_s
        return True

    def max_drafts(self, sequence: Sequence) -> int:
        return 10**6

    def propose(self, requests: list[tuple[Sequence, int]]) -> dict[int, list[int]]:
        """As many steps as the deepest draft, each of the rows that are still wanted."""
        owner, deepest = self._owner, max((count for _, count in requests), default=0)
        self.reading = sum(self.num_unread_tokens(sequence) for sequence, _ in requests)
        self._seen_ids |= {sequence.seq_id for sequence, _ in requests}
        self.seconds += self.reading
        owner.now += self.reading
        for depth in range(deepest):
            rows = sum(count > depth for _, count in requests)
            seconds = owner.noisy(self._cost(rows))
            self.costs.record(rows, seconds)
            owner.now += self._cost(rows)
            self.seconds += seconds
        return {sequence.seq_id: [_RIGHT] * count for sequence, count in requests}

    def num_unread_tokens(self, sequence: Sequence) -> float:
        """What isn't known of it."""
        return 0.0 if sequence.seq_id in self._seen_ids else self._prompt

    def forget(self, sequence: Sequence) -> None:
        """It isn't followed any more."""
        if self.following is not None:
            self.following.remove(sequence.seq_id)


class Simulation:
    """Rows that decode, as many as `rows` says of a step; who ends is followed by another.

    `text`: see `Text`. `draft`: what a draft model's step takes; None: drafts come from text, and
    `finds` of all looks find some. `look`: what a look at a row takes. `lengths`: of outputs.
    `noise`: by how much steps are off, and the machine's pace wanders. `tenants`: so many have rows
    in turns. `prompt`: what a draft model takes to read what stands before a row's first draft.
    `follows`: the draft model is a head that has to read all along; prompts take time then.
    `start`: steps that are wider than `rows`, and drafts, take so many times as long while they are
    measured at first.
    """

    def __init__(
        self,
        cost: Cost,
        rows: int | Callable[[int], int],
        text: Text,
        *,
        draft: Cost | None = None,
        lookup_s: float = 0.0,
        finds: float = 0.7,
        lengths: tuple[int, int] = (10, 60),
        noise: float = 0.0,
        seed: int = 0,
        tenants: int = 1,
        prompt: float = 0.0,
        start: float = 1.0,
        follows: Follows | None = None,
    ) -> None:
        self.rng, self.now = random.Random(seed), 0.0
        self._cost = lambda width: cost(width) * (start if width > self._rows(0) else 1.0)
        self._text, self._noise, self._pace = text, noise, 0.0
        self._rows = rows if callable(rows) else lambda step: rows
        self._lengths, self._tenants, self._ids, self._step = lengths, tenants, 0, 0
        self._sequences: dict[int, Sequence] = {}
        self._follows, self._finished_ids = follows, list[int]()
        model = None
        if draft is not None:
            model = _Model(self, draft, lookup_s, prompt, follows=follows is not None)
        self.drafter = Drafter(CONFIG, 100_000, model=model)  # type: ignore[arg-type]
        self.drafter.clock = lambda: self.now
        if model is None:
            self.drafter._proposer = _Guessing(self, finds, lookup_s)  # type: ignore[assignment]
        else:
            for _ in range(6):
                model.costs.record(1, self.noisy(start * model._cost(1)))
        for width in 2 * (1, 2, 4, 8, 16, 32, 64):
            for _ in range(3):
                self._record_step(list(range(width)), [1] * width)
        self._cost = cost

    def noisy(self, seconds: float) -> float:
        """So long as a clock would say."""
        if not self._noise:
            return seconds
        slower = 2.5 if self.rng.random() < 0.02 else 1.0
        return seconds * slower * math.exp(self._pace + self.rng.gauss(0.0, self._noise))

    @property
    def num_started(self) -> int:
        """Rows that have begun."""
        return self._ids

    @property
    def followed(self) -> int:
        """Rows that are."""
        following = self.drafter._tracking
        return (
            0 if following is None else sum(sequence in following for sequence in self._sequences)
        )

    def _read(self, new_rows: list[Sequence], spent: Spent) -> None:
        """A step with the prompts of rows that begin."""
        if self._follows is None or not new_rows:
            return
        ids, more = [sequence.seq_id for sequence in new_rows], 0.0
        new = [NewSequence(seq_id, [0] * 8, 8, 0, [[]], SamplingParams(), 0) for seq_id in ids]
        extra_rows = [row for row in self._sequences.values() if row.seq_id not in ids]
        counts = [1] * len(extra_rows) + [8] * len(ids)
        rows = [
            *extra_rows,
            *new_rows,
        ]  # those that decode wait for the prompts: it's their time, too
        plan = StepPlan(self._step, [row.seq_id for row in rows], counts, [1] * len(rows), new=new)
        self._leave(plan, rows)
        self.drafter.propose(extra_rows, 0)
        followed = sum(seq_id not in plan.untracked for seq_id in ids)
        seconds, more = len(ids) * self._follows.prompt, followed * self._follows.more
        self._took(plan, seconds, more)
        spent.baseline_s += seconds
        spent.seconds += seconds + more

    def _leave(self, plan: StepPlan, scheduled: list[Sequence]) -> None:
        plan.removed, self._finished_ids = self._finished_ids, []
        plan.untracked = self.drafter.untracked_sequences(plan, scheduled)

    def _took(self, plan: StepPlan, seconds: float, following: float) -> None:
        self.now += seconds + following
        self.drafter.record_tracking(following)
        self.drafter.note_step(plan, seconds + following)

    def _record_step(self, seq_ids: list[int], widths: list[int], following: float = 0.0) -> None:
        self._pace += self.rng.gauss(0.0, self._noise / 2) - 0.02 * self._pace
        drafts = {seq_id: [0] * (width - 1) for seq_id, width in zip(seq_ids, widths, strict=True)}
        model = self.drafter.model
        initial = self.drafter._planning_seconds + (0.0 if model is None else model.seconds)
        plan = StepPlan(1, seq_ids, widths, widths, drafts)
        self.drafter.record_tracking(following)
        self.drafter.note_step(plan, initial + following + self.noisy(self._cost(sum(widths))))

    def _fill(self) -> list[Sequence]:
        """Rows that begin."""
        filled = list[Sequence]()
        while len(self._sequences) < self._rows(self._step):
            self._ids += 1
            tenant = str(self._ids % self._tenants)
            row = sequence([0] * 8, [0], self._ids, tenant=tenant)
            row.max_output_tokens = 1 + self.rng.randint(*self._lengths)
            self._sequences[self._ids] = row
            filled.append(row)
        return filled

    def _emit(self, row: Sequence, num_drafts: int) -> int:
        p, num_accepted = self._text(self._step, row), 0
        while right := self.rng.random() < p:
            if num_accepted == num_drafts:
                break
            num_accepted += 1
        row.token_ids += [_RIGHT] * num_accepted + [_RIGHT if right else _MISMATCH]
        if num_drafts:
            self.drafter.record_outcome(row, num_drafts, num_accepted)
        if row.num_output_tokens >= row.max_output_tokens:
            self._sequences.pop(row.seq_id).status = SequenceStatus.FINISHED
            self._finished_ids.append(row.seq_id)
        return num_accepted + 1

    def run(self, steps: int) -> Spent:
        """Go on for so many steps."""
        spent, cost = Spent(), self._cost
        for _ in range(steps):
            self._step += 1
            self._read(self._fill(), spent)
            rows, started = list(self._sequences.values()), self.now
            ids = [row.seq_id for row in rows]
            if self._follows is not None:
                self._leave(StepPlan(self._step, ids, [1] * len(ids), [1] * len(ids)), rows)
            drafts = self.drafter.propose(rows, 10**6)
            widths = [1 + len(drafts.get(row.seq_id, [])) for row in rows]
            following = 0.0 if self._follows is None else self._follows.row * self.followed
            self.now += cost(sum(widths)) + following
            self._record_step(ids, widths, following)
            pairs = zip(rows, widths, strict=True)
            tokens = sum(self._emit(row, width - 1) for row, width in pairs)
            spent.tokens += tokens
            spent.baseline_s += tokens * cost(len(rows)) / len(rows)
            spent.seconds += self.now - started
        return spent
