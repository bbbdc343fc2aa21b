"""`Drafter`: how many drafts each row of a step gets."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from typing import NamedTuple

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.speculative_config import SpeculativeConfig
from engine.models.interface import ModelFacts
from engine.scheduler import Sequence, StepPlan
from engine.speculative.draft_model import DraftModelProposer
from engine.speculative.estimates import (
    AcceptanceEstimate,
    HeadTracking,
    LossBound,
    StepTimes,
    TenantAcceptance,
)
from engine.speculative.head_proposer import HeadProposer
from engine.speculative.interface import DraftHost, DraftProposer
from engine.speculative.ngram import PROPOSERS, Proposer
from engine.speculative.planner import DraftOffer, DraftStep, Planner

# -- `ShadowVerifier`: guesses that weren't worth checking, compared with what came.


class ShadowResult(NamedTuple):
    """So many of a guess's tokens were compared, of which the first ones came."""

    sequence: Sequence
    matched: int
    num_drafts: int
    num_accepted: int


@dataclass(slots=True)
class _Watched:
    sequence: Sequence
    matched: int
    tokens: list[int]
    at: int


class ShadowVerifier:
    """How often drafts would have held, for nothing: no step is wider for it.

    Where drafts don't pay at the chance that is expected of them, it would never be found out that
    they hold more often.
    """

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._watched

    def add(self, sequence: Sequence, matched: int, tokens: list[int]) -> None:
        """What may follow a sequence's newest token."""
        watched = _Watched(sequence, matched, tokens, len(sequence.token_ids))
        self._watched[sequence.seq_id] = watched

    def drop(self, seq_id: int) -> None:
        """The sequence gets drafts, or has left."""
        self._watched.pop(seq_id, None)

    def take_checked(self) -> list[ShadowResult]:
        """Those of which it's known by now how many came."""
        done = []
        for each in self._watched.values():
            came = each.sequence.token_ids[each.at : each.at + len(each.tokens)]
            held = _common(came, each.tokens)
            if held < len(came) or held == len(each.tokens):
                compared = min(held + 1, len(each.tokens))
                done.append(ShadowResult(each.sequence, each.matched, compared, held))
        for checked in done:
            del self._watched[checked.sequence.seq_id]
        return done


def _common(a: list[int], b: list[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count


Possible = Callable[[Sequence, list[int]], list[int]]
#: The part of steps' time that may go into looking for drafts of which it's known only that they'd
#: pay if all held.
PROBE_TIME_FRACTION = 0.003
#: A batch in which no draft pays is asked again after so many steps, or once others are in it; one
#: in which none could pay, whatever is said, or which can't pay for any, later.
_REST, _LONG_REST = 8, 32
#: What a draft model reads of a sequence is to pay within so many tokens: more may never come.
_GAINING = 64


@dataclass(slots=True)
class _DraftRow:
    """A sequence that had drafts.

    Attributes:
        matched: see `Proposal`, of the newest ones.
        begun: a draft model is reading it, and isn't at its end yet.
    """

    sequence: Sequence
    tenant: str
    chances: AcceptanceEstimate
    matched: int = 0
    begun: bool = False


class Drafter:
    """Gives drafts to the rows where they promise the most tokens for the step's time.

    A draft brings as many tokens as it is likely to hold with all those before it
    (`AcceptanceEstimate`); a
    step that is one token wider takes longer by what `StepTimes` knows, and what a `DraftProposer`
    takes comes before it. Drafts are added, the likeliest first, up to where tokens per second are
    highest, or where their tenant could not bear that none of them holds (`LossBound`). In a
    full
    batch, where a wider step takes as much longer, none are, none are looked for, and nobody asks
    in each step. Where they'd pay if more of them held than is expected, some are looked for now
    and then and compared with what comes (`ShadowVerifier`).

    Attributes:
        clock: tells seconds.
        timing: while steps are timed a draft model draws whether that pays or not.
        costs: of the model's steps.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        max_model_len: int,
        possible: Possible | None = None,
        model: DraftProposer | None = None,
    ) -> None:
        """`possible`: cuts a sequence's drafts to those that what it follows allows; `model`: who
        computes drafts, where they don't come from text.
        """
        self._config = config
        self._allowed = possible or (lambda sequence, drafts: drafts)
        self._max_model_len = max_model_len
        self.model = model
        self._proposer: Proposer | None = None
        if model is None:
            self._proposer = PROPOSERS[config.method](config)
        self.clock: Callable[[], float] = time.perf_counter
        self._rows: dict[int, _DraftRow] = {}
        self._usual = self._unknown_chances()
        self._watch = ShadowVerifier()
        #: Of looking for drafts: a row's seconds on average, those since the last step, and steps
        #: since the last look.
        self._look_seconds, self._looked, self._unseen = 0.0, 0.0, 0
        #: Seconds that it took to give steps a model's drafts, beside the model's own.
        self._planning = 0.0
        self._losses = LossBound()
        #: A batch in which no draft pays: its rows, the last of them, and until which step.
        self._resting = 0, 0, 0
        self.timing = False
        #: Seconds that it took to follow the last step.
        self._following_took = 0.0
        self.costs = StepTimes(pace=None if model is None else model.costs.pace)
        self._planner = self._new_planner()

    @property
    def _following(self) -> HeadTracking | None:
        return None if self.model is None else self.model.following

    def untracked_sequences(self, plan: StepPlan, scheduled: list[Sequence]) -> list[int]:
        """See `DraftProposer`."""
        following = self._following
        if following is None or not (plan.new or following):
            return []
        if self.timing:
            return following.untracked_sequences(plan, scheduled, self._may_draft, None, 0.0)
        self._losses.begin_step(self._usual.step, _tenants(scheduled))
        price = self._price(len(scheduled))
        return following.untracked_sequences(plan, scheduled, self._may_draft, self._losses, price)

    def _may_draft(self, sequence: Sequence) -> bool:
        """Whether a model may ever draw for a sequence that begins."""
        model = self.model
        return model is not None and model.is_healthy and self._most_drawn(sequence, model) > 0

    def _price(self, width: int) -> float:
        """Tokens that a second stands for while so many rows decode."""
        return width / self.costs.seconds(width)

    def note_following(self, seconds: float) -> None:
        """It took so long to follow the step that was run last."""
        self._following_took = seconds

    def propose(self, decoding: list[Sequence], room: int, beside: int = 0) -> dict[int, list[int]]:
        """Drafts by sequence id.

        Args:
            decoding: the rows of the step that decode.
            room: most drafts of the step.
            beside: tokens of prompts in the step.
        """
        self._usual.step += 1
        if not decoding or self._rests(decoding):
            return {}
        if not any(map(self._knows, decoding)):
            self._losses.begin_step(self._usual.step, _tenants(decoding))
            return self._pause_drafting(decoding, _LONG_REST)
        started = self.clock()
        self._take_checked()
        self._forget_those_that_left()
        rows, width = [self._row(each) for each in decoding], len(decoding)
        step = DraftStep(width, min(room, self.costs.most - width), beside, self._planning)
        off = 0 < self._config.disable_by_batch_size <= width
        if off or step.most < 1:
            return self._pause_drafting(decoding)
        due = self._planner.num_trial_drafts(step) > 0
        if not (due or self._planner.may_pay_off(step) or self._is_timed):
            return self._pause_drafting(decoding, _LONG_REST)
        needed = self._planner.needed_odds(step, width * self._look_seconds)
        self._losses.begin_step(self._usual.step, Counter([row.tenant for row in rows]))
        drafts = self._propose_trial(rows, step, needed, due)
        self._looked = self.clock() - started - (self.model.seconds if self.model else 0.0)
        if self.model is not None and self.model.seconds:
            self._planning = self._averaged(self._planning, self._looked, step)
        looked = min(self._looked, self.costs.seconds(width))  # else the machine stood still
        self._charge(self._losses.charge, looked / width, rows, step)
        return drafts

    def _propose_trial(
        self, rows: list[_DraftRow], step: DraftStep, needed: float, due: bool
    ) -> dict[int, list[int]]:
        """Drafts of those rows whose drafts may pay, for which they need such odds; of any where a
        trial is due.
        """
        if self._is_timed:
            return self._drawn(rows, step)
        hopeful = [
            row
            for row in rows
            if (due or row.chances.best_odds() > needed) and self._knows(row.sequence)
        ]
        if self.model is not None:
            drafts = self._drawn(hopeful, step) if hopeful else {}
            if not (hopeful and self._planner.pays):
                long = needed == inf or (hopeful and self._planner.poor)
                self._pause_drafting([row.sequence for row in rows], _LONG_REST if long else _REST)
            return drafts
        if hopeful and (able := self._able_to_look(hopeful, step)):
            drafts = self._found(able, step)
            if drafts or not due:
                return drafts
        self._unseen += 1
        if self._is_probe_due(step.width * self._look_seconds, step):
            self._probe(self._able_to_look(rows, step), step)
        rest = _LONG_REST if needed == inf else _REST
        return self._pause_drafting([row.sequence for row in rows], rest)

    def _is_probe_due(self, seconds: float, step: DraftStep) -> bool:
        """Whether so long since the last look one may take so many seconds."""
        return seconds <= PROBE_TIME_FRACTION * self._unseen * self.costs.seconds(step.width)

    def _knows(self, sequence: Sequence) -> bool:
        """Whether a sequence may have drafts: whoever draws them may have to follow it."""
        following = self._following
        return following is None or sequence.seq_id in following

    def _rests(self, decoding: list[Sequence]) -> bool:
        """Whether no draft of this batch paid a few steps ago."""
        width, last, until = self._resting
        if self._usual.step >= until or self.timing:
            return False
        self._unseen += 1
        return width == len(decoding) and last == decoding[-1].seq_id

    def _pause_drafting(self, decoding: list[Sequence], steps: int = _REST) -> dict[int, list[int]]:
        """No drafts for so many steps."""
        self._resting = len(decoding), decoding[-1].seq_id, self._usual.step + steps
        return {}

    def _take_checked(self) -> None:
        """Take note of guesses that nobody checked but what came."""
        for checked in self._watch.take_checked():
            row = self._row(checked.sequence)
            row.chances.note(checked.matched, checked.num_drafts, checked.num_accepted)

    @property
    def _is_timed(self) -> bool:
        return self.timing and self.model is not None

    def _found(self, rows: list[_DraftRow], step: DraftStep) -> dict[int, list[int]]:
        """Drafts from text: all that there are, then as many of them as pay."""
        proposed = self._probe(rows, step)
        counts = self._worth({seq_id: len(drafts) for seq_id, drafts in proposed.items()}, step)
        for seq_id in counts:
            self._watch.drop(seq_id)
        return {seq_id: proposed[seq_id][:count] for seq_id, count in counts.items()}

    def _able_to_look(self, rows: list[_DraftRow], step: DraftStep) -> list[_DraftRow]:
        """Those whose tenants can bear that nothing is found."""
        price = self._look_seconds * step.width / self.costs.seconds(step.width)
        prices = {tenant: price * n for tenant, n in Counter([row.tenant for row in rows]).items()}
        able = {each for each in prices if self._losses.can_look(each, prices[each])}
        return rows if len(able) == len(prices) else [row for row in rows if row.tenant in able]

    def _probe(self, rows: list[_DraftRow], step: DraftStep) -> dict[int, list[int]]:
        """Drafts that there are, by sequence id; all are watched."""
        started, proposed = self.clock(), {}
        for row in rows:
            sequence = row.sequence
            count = self._most(sequence)
            if count > 0 and self._proposer is not None:
                guess = self._proposer.propose(sequence, count)
                if guess.tokens and (drafts := self._possible(sequence, guess.tokens)):
                    row.matched = guess.match_length
                    if sequence.seq_id not in self._watch:
                        self._watch.add(sequence, guess.match_length, drafts)
                    proposed[sequence.seq_id] = drafts
        self._unseen = 0
        if rows:
            looking = (self.clock() - started) / len(rows) * step.width
            known = self._look_seconds * step.width
            self._look_seconds = self._averaged(known, looking, step) / step.width
        return proposed

    def _averaged(self, known: float, new: float, step: DraftStep) -> float:
        """Seconds of a step's part that took `known` ones; what took longer than the step has met a
        machine that stood still.
        """
        new = min(new, self.costs.seconds(step.width))
        return known + 0.1 * (new - known)

    def _charge(
        self,
        pay: Callable[[str, float], None],
        seconds: float,
        rows: list[_DraftRow],
        step: DraftStep,
    ) -> None:
        """Have the tenants pay so many seconds for each row, in tokens."""
        price = seconds * step.width / self.costs.seconds(step.width)
        for tenant, count in Counter([row.tenant for row in rows]).items():
            pay(tenant, price * count)

    def _drawn(self, rows: list[_DraftRow], step: DraftStep) -> dict[int, list[int]]:
        """Drafts of a model, which cost: first as many as pay, and then these are drawn."""
        model = self.model
        if model is None or not model.is_healthy:
            return {}
        possible, own = {}, {}
        for row in rows:
            if (count := self._most_drawn(row.sequence, model)) > 0:
                own[row.sequence.seq_id], possible[row.sequence.seq_id] = row.sequence, count
        counts = self._worth(possible, step)
        if not counts:
            return {}
        to_read = {seq_id: model.num_unread_tokens(own[seq_id]) for seq_id in counts}
        drawn = model.propose([(own[seq_id], count) for seq_id, count in counts.items()])
        if not (self._is_timed or self._planner.trying):
            drawing = (model.seconds - model.reading) * self._price(step.width)
            for seq_id in counts:
                self._pay(seq_id, drawing / len(counts))
            self._charge_reading(model.reading, to_read, drawn, step)
        found = {seq_id: self._possible(own[seq_id], drafts) for seq_id, drafts in drawn.items()}
        return {seq_id: drafts for seq_id, drafts in found.items() if drafts}

    def _charge_reading(
        self, seconds: float, to_read: dict[int, float], drawn: Container[int], step: DraftStep
    ) -> None:
        """Have those that were read pay, each for its part; `drawn`: those read to their end."""
        total = sum(to_read.values())
        for seq_id, expected in to_read.items():
            row, part = self._rows[seq_id], expected / total if total else 1.0 / len(to_read)
            self._charge(self._losses.charge_reading, seconds * part, [row], step)
            row.begun = seq_id not in drawn

    def _possible(self, sequence: Sequence, drafts: list[int]) -> list[int]:
        """The first of a sequence's drafts, those that may come: its adapter may have fewer tokens
        than the model that gave them.
        """
        if own := sequence.request.vocab_size:
            drafts = list(takewhile(own.__gt__, drafts))
        return self._allowed(sequence, drafts)

    def _most_drawn(self, sequence: Sequence, model: DraftProposer) -> int:
        """Drafts of a model that a sequence can use; below 1: none."""
        count = min(self._most(sequence), model.max_drafts(sequence))
        return count if count > 0 and model.supports(sequence) else 0

    def note(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """A row's drafts were checked."""
        self._watch.drop(sequence.seq_id)
        row = self._row(sequence)
        row.chances.note(row.matched, num_drafts, num_accepted)
        self._losses.charge(row.tenant, -num_accepted)
        self._resting = 0, 0, 0

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """A step was run; the seconds of a draft model's steps before it are no part of it."""
        if self.model is not None:
            seconds -= self.model.seconds
            self.model.seconds = self.model.reading = 0.0
        seconds, self._looked = seconds - self._looked, 0.0
        following, self._following_took = self._following_took, 0.0
        if self._following is not None and not self.timing:
            price = self._price(len(plan.seq_ids)) if plan.seq_ids else 0.0
            self._following.charge(plan, seconds - following, following, self._losses, price)
        seconds -= following
        if not plan.num_prompt_tokens and plan.seq_ids:
            self.costs.note(plan.num_tokens, seconds)
            self._planner.note(sum(map(len, plan.drafts.values())))
        if any(plan.drafts.values()) and not self.timing:
            self._pay_for_drafts(plan)

    def _pay_for_drafts(self, plan: StepPlan) -> None:
        """Each draft pays for its part of the wider step, by what is known now that it was run."""
        total = sum(map(len, plan.drafts.values()))
        price = self._planner.extra_seconds(
            DraftStep(plan.num_decodes, total, plan.num_prompt_tokens), total
        )
        for seq_id, drafts in plan.drafts.items():
            if count := min(len(drafts), self._planner.paid[seq_id]):
                self._pay(seq_id, count * price)

    def _pay(self, seq_id: int, tokens: float) -> None:
        """A sequence's drafts took the time of so many tokens."""
        self._losses.charge(self._rows[seq_id].tenant, tokens)

    def reset(self, *, worker_too: bool = False) -> None:
        """Forget what a draft model has cached; `worker_too`: its memory was given back."""
        if self.model is not None:
            self.model.reset(worker_too=worker_too)

    def start_over(self) -> None:
        """Forget what was said and what held so far, but not what steps take."""
        self._rows, self._usual, self._watch = {}, self._unknown_chances(), ShadowVerifier()
        self._losses, self._resting = LossBound(), (0, 0, 0)
        self._planner = self._new_planner()
        if self.model is None:
            self._proposer = PROPOSERS[self._config.method](self._config)

    def _new_planner(self) -> Planner:
        drawing = None if self.model is None else self.model.costs
        most = self._config.num_speculative_tokens
        return Planner(self.costs, drawing, self._losses, most)

    def _unknown_chances(self) -> TenantAcceptance:
        return TenantAcceptance(self._config.prompt_lookup_max if self.model is None else 0)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless a draft model's pool is in order."""
        if self.model is not None:
            self.model.check_integrity()

    def _row(self, sequence: Sequence) -> _DraftRow:
        row = self._rows.get(sequence.seq_id)
        if row is None:
            tenant = sequence.request.message.tenant
            row = _DraftRow(sequence, tenant, AcceptanceEstimate(self._usual, tenant))
            self._rows[sequence.seq_id] = row
        return row

    def _most(self, sequence: Sequence) -> int:
        """Drafts that a sequence can use: a step gives one token more than drafts hold."""
        left = sequence.max_output_tokens - sequence.num_output_tokens
        capped = sequence.request.remaining_tokens
        if capped is not None:
            left = min(left, capped)
        left = min(left, self._max_model_len - sequence.num_tokens)
        return (
            min(self._config.num_speculative_tokens, left - 1) if can_verify_drafts(sequence) else 0
        )

    def _worth(self, possible: dict[int, int], step: DraftStep) -> dict[int, int]:
        """How many drafts pay, by sequence id, of the first `possible` ones of each."""
        offers = []
        for seq_id, count in possible.items():
            row = self._rows[seq_id]
            chances = row.chances.at_worst(row.matched, count)
            offers.append(DraftOffer(chances, seq_id, row.tenant, *self._reading(row)))
        if self._is_timed:
            drafts = [each.seq_id for each in offers for _ in each.chances]
            return Counter(drafts[: step.most])
        return self._planner.choose(offers, step)

    def _reading(self, row: _DraftRow) -> tuple[float, int]:
        """What a draft model must read first, beyond what it has begun to read, and the tokens that
        gain by it.
        """
        if self.model is None or row.begun:
            return 0.0, 1
        left = row.sequence.max_output_tokens - row.sequence.num_output_tokens
        return self.model.num_unread_tokens(row.sequence), max(1, min(left, _GAINING))

    def _forget_those_that_left(self) -> None:
        for seq_id, row in list(self._rows.items()):
            if row.sequence.finished:
                del self._rows[seq_id]
                self._losses.end_sequence(row.tenant)
                self._watch.drop(seq_id)
                if (source := self.model or self._proposer) is not None:
                    source.forget(row.sequence)


def _tenants(sequences: list[Sequence]) -> dict[str, int]:
    """How many are whose."""
    return Counter([each.request.message.tenant for each in sequences])


def can_verify_drafts(sequence: Sequence) -> bool:
    """Whether a sequence's drafts can be checked: nothing but its own draws chooses its tokens."""
    beams = sequence.request.message.sampling.use_beam_search
    return not (beams or sequence.wants_prompt_logprobs)


# -- `make_drafter`: who gives drafts, as the settings say.


def make_drafter(
    config: EngineConfig,
    facts: ModelFacts,
    *,
    overlaps: bool,
    possible: Possible | None = None,
    host: DraftHost,
) -> Drafter | None:
    """As the settings say; None without `speculative_config`. `possible`: see `Drafter`; `host`:
    what was loaded beside the model.

    Raises `ConfigError` where drafts can't be checked.
    """
    if not config.speculative_config:
        return None
    wanted = SpeculativeConfig.from_mapping(config.speculative_config)
    obstacle = ""
    if facts.pooling is not None:
        obstacle = "the model generates no text"
    elif facts.stateful:
        obstacle = f"the state of {facts.architecture} can't be taken back to where a draft failed"
    elif overlaps:
        obstacle = (
            "with async_scheduling steps are planned before the tokens are known from which drafts "
            "go on; leave it out, or turn it off"
        )
    if obstacle:
        raise ConfigError(
            f"speculative_config can't be used: {obstacle}.", param="speculative_config"
        )
    model: DraftProposer | None = None
    if host.heads is not None:
        model = HeadProposer(host.heads, host.propose)
    elif host.model is not None:
        ends = facts.eos_token_ids
        model = DraftModelProposer(
            host.model, host.execute, config.block_size, config.max_num_seqs, ends
        )
    return Drafter(wanted, facts.max_model_len, possible, model)
