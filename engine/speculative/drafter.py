"""`Drafter`: decides how many drafts each row of a step gets."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from math import inf

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.speculative_config import SpeculativeConfig
from engine.models.interface import ModelFacts
from engine.scheduler import Sequence, StepPlan
from engine.speculative.acceptance import AcceptanceEstimate, TenantAcceptance
from engine.speculative.draft_model import DraftModelProposer
from engine.speculative.head_proposer import HeadProposer
from engine.speculative.head_tracking import HeadTracking
from engine.speculative.interface import DraftHost, DraftProposer
from engine.speculative.loss_bound import LossBound
from engine.speculative.ngram import PROPOSERS, Proposer
from engine.speculative.planner import DraftOffer, DraftStep, Planner
from engine.speculative.shadow_verifier import ShadowVerifier
from engine.speculative.step_times import StepTimes

Possible = Callable[[Sequence, list[int]], list[int]]
#: Maximum fraction of the steps' time for lookups while no draft is expected to pay.
PROBE_TIME_FRACTION = 0.003
#: Number of steps without drafts after a batch in which none pays, unless its rows change; and
#: after one in which none could pay at any probability, or whose tenants have no budget.
_PAUSE, _LONG_PAUSE = 8, 32
#: Reading a sequence must pay off within this many tokens, since more may never be generated.
_MAX_READING_TOKENS = 64


@dataclass(slots=True)
class _DraftRow:
    """A sequence that had drafts.

    Attributes:
        match_length: of the newest drafts, see `Proposal`.
        is_reading: a draft model has begun to read the sequence and hasn't reached its end.
    """

    sequence: Sequence
    tenant: str
    acceptance: AcceptanceEstimate
    match_length: int = 0
    is_reading: bool = False


class Drafter:
    """Gives drafts to the rows where they are expected to yield the most tokens per second.

    `AcceptanceEstimate` estimates acceptance, `StepTimes` the time of a wider step, `LossBound`
    limits each tenant's loss, and `Planner` chooses. In a full batch, whose time grows in
    proportion to its width, there are no drafts and no lookups. Where only a higher acceptance than
    estimated would make drafts pay, some are looked up now and then and compared with the tokens
    that follow (`ShadowVerifier`).

    Attributes:
        clock: returns seconds.
        timing: while true, a draft model drafts whether or not that pays, so that it is timed.
        costs: times of the target model's steps.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        max_model_len: int,
        filter_drafts: Possible | None = None,
        model: DraftProposer | None = None,
    ) -> None:
        """`filter_drafts`: cuts drafts to those that the sequence's constraints allow; `model`:
        computes drafts; None: drafts are looked up in text.
        """
        self._config = config
        self._allowed = filter_drafts or (lambda sequence, drafts: drafts)
        self._max_model_len = max_model_len
        self.model = model
        self._proposer: Proposer | None = None
        self.clock: Callable[[], float] = time.perf_counter
        self.timing = False
        self.costs = StepTimes(speed=None if model is None else model.costs.speed)
        #: Average seconds of a row's lookup, seconds of planning since the last step, and number of
        #: steps since the last lookup.
        self._lookup_seconds, self._planning_seconds, self._num_unseen = 0.0, 0.0, 0
        #: Average seconds of planning a model's drafts, without drawing them.
        self._planning = 0.0
        #: Seconds of tracking in the last step.
        self._tracking_seconds = 0.0
        self.clear_history()

    def clear_history(self) -> None:
        """Forget texts, acceptance and losses, but not the times of steps."""
        max_match = self._config.prompt_lookup_max if self.model is None else 0
        self._acceptance = TenantAcceptance(max_match)
        self._rows: dict[int, _DraftRow] = {}
        self._shadows, self._losses = ShadowVerifier(), LossBound()
        #: Batch in which no draft pays: its size, its last row, and the step at which it ends.
        self._pause = 0, 0, 0
        drawing = None if self.model is None else self.model.costs
        max_drafts = self._config.num_speculative_tokens
        self._planner = Planner(self.costs, drawing, self._losses, max_drafts)
        if self.model is None:
            self._proposer = PROPOSERS[self._config.method](self._config)

    @property
    def _tracking(self) -> HeadTracking | None:
        return None if self.model is None else self.model.following

    def untracked_sequences(self, plan: StepPlan, scheduled: list[Sequence]) -> list[int]:
        """Return sequences of the step that a layer head stops tracking."""
        tracking = self._tracking
        if tracking is None or not (plan.new or tracking):
            return []
        if self.timing:
            return tracking.untracked_sequences(plan, scheduled, self._can_ever_draft, None, 0.0)
        self._losses.begin_step(self._acceptance.step, _rows_by_tenant(scheduled))
        rate = self._token_rate(len(scheduled))
        return tracking.untracked_sequences(
            plan, scheduled, self._can_ever_draft, self._losses, rate
        )

    def _can_ever_draft(self, sequence: Sequence) -> bool:
        """Whether the model may ever draft for a new sequence."""
        model = self.model
        return model is not None and model.is_healthy and self._max_drawn(sequence, model) > 0

    def _token_rate(self, width: int) -> float:
        """Return tokens per second while `width` rows decode without drafts."""
        return width / self.costs.seconds(width)

    def record_tracking(self, seconds: float) -> None:
        """Record the seconds of tracking in the last step."""
        self._tracking_seconds = seconds

    def propose(
        self, decoding: list[Sequence], max_drafts: int, num_prompt_tokens: int = 0
    ) -> dict[int, list[int]]:
        """Return drafts by sequence id.

        Args:
            decoding: decoding rows of the step.
            max_drafts: maximum number of drafts in the step.
            num_prompt_tokens: number of prompt tokens in the step.
        """
        self._acceptance.step += 1
        if not decoding or self._is_paused(decoding):
            return {}
        if not any(map(self._is_tracked, decoding)):
            self._losses.begin_step(self._acceptance.step, _rows_by_tenant(decoding))
            return self._pause_drafting(decoding, _LONG_PAUSE)
        started = self.clock()
        for result in self._shadows.pop_results():
            acceptance = self._row(result.sequence).acceptance
            acceptance.update(result.match_length, result.num_drafts, result.num_accepted)
        self._remove_finished()
        rows, width = [self._row(sequence) for sequence in decoding], len(decoding)
        step = DraftStep(
            width, min(max_drafts, self.costs.max_width - width), num_prompt_tokens, self._planning
        )
        is_off = 0 < self._config.disable_by_batch_size <= width
        if is_off or step.max_drafts < 1:
            return self._pause_drafting(decoding)
        is_trial_due = self._planner.num_trial_drafts(step) > 0
        if not (is_trial_due or self._planner.can_pay(step) or self._is_timed):
            return self._pause_drafting(decoding, _LONG_PAUSE)
        self._losses.begin_step(self._acceptance.step, _rows_by_tenant(decoding))
        drafts = self._propose_paying(rows, step, is_trial_due)
        self._planning_seconds = (
            self.clock() - started - (self.model.seconds if self.model else 0.0)
        )
        if self.model is not None and self.model.seconds:
            self._planning = self._average(self._planning, self._planning_seconds, step)
        # Anything longer than a step means that the machine was interrupted.
        seconds = min(self._planning_seconds, self.costs.seconds(width))
        self._charge(self._losses.charge, seconds / width, rows, step)
        return drafts

    def _propose_paying(
        self, rows: list[_DraftRow], step: DraftStep, is_trial_due: bool
    ) -> dict[int, list[int]]:
        """Return drafts that may pay; if a trial is due, of any row."""
        if self._is_timed:
            return self._draw(rows, step)
        min_odds = self._planner.min_log_odds(step, step.width * self._lookup_seconds)
        candidates = [
            row
            for row in rows
            if (is_trial_due or row.acceptance.best_log_odds() > min_odds)
            and self._is_tracked(row.sequence)
        ]
        pause = _LONG_PAUSE if min_odds == inf else _PAUSE
        if self.model is not None:
            drafts = self._draw(candidates, step) if candidates else {}
            if candidates and self._planner.pays:
                return drafts
            if candidates and self._planner.is_exhausted:
                pause = _LONG_PAUSE
            self._pause_drafting([row.sequence for row in rows], pause)
            return drafts
        if candidates and (affordable := self._rows_with_lookup_budget(candidates, step)):
            drafts = self._look_up_paying(affordable, step)
            if drafts or not is_trial_due:
                return drafts
        self._num_unseen += 1
        budget = PROBE_TIME_FRACTION * self._num_unseen * self.costs.seconds(step.width)
        if step.width * self._lookup_seconds <= budget:
            self._look_up(self._rows_with_lookup_budget(rows, step), step)
        return self._pause_drafting([row.sequence for row in rows], pause)

    def _is_tracked(self, sequence: Sequence) -> bool:
        """Whether a sequence may have drafts: if there is a layer head, it must track it."""
        return self._tracking is None or sequence.seq_id in self._tracking

    def _is_paused(self, decoding: list[Sequence]) -> bool:
        """Whether this batch had no paying draft a few steps ago."""
        width, last, end = self._pause
        if self._acceptance.step >= end or self.timing:
            return False
        self._num_unseen += 1
        return width == len(decoding) and last == decoding[-1].seq_id

    def _pause_drafting(
        self, decoding: list[Sequence], num_steps: int = _PAUSE
    ) -> dict[int, list[int]]:
        """Give this batch no drafts for some steps; return none."""
        self._pause = len(decoding), decoding[-1].seq_id, self._acceptance.step + num_steps
        return {}

    @property
    def _is_timed(self) -> bool:
        return self.timing and self.model is not None

    def _rows_with_lookup_budget(self, rows: list[_DraftRow], step: DraftStep) -> list[_DraftRow]:
        """Return rows whose tenants can afford a lookup without result."""
        price = self._lookup_seconds * self._token_rate(step.width)
        counts = Counter([row.tenant for row in rows])
        able = {
            tenant for tenant, n in counts.items() if self._losses.can_look_up(tenant, n * price)
        }
        return [row for row in rows if row.tenant in able]

    def _look_up_paying(self, rows: list[_DraftRow], step: DraftStep) -> dict[int, list[int]]:
        """Look up drafts in text for all rows, and return those that pay."""
        proposed = self._look_up(rows, step)
        counts = self._num_paying(
            {seq_id: len(drafts) for seq_id, drafts in proposed.items()}, step
        )
        for seq_id in counts:
            self._shadows.remove(seq_id)
        return {seq_id: proposed[seq_id][:count] for seq_id, count in counts.items()}

    def _look_up(self, rows: list[_DraftRow], step: DraftStep) -> dict[int, list[int]]:
        """Look up drafts in text; return them by sequence id and pass them to `ShadowVerifier`."""
        started, proposed = self.clock(), {}
        for row in rows:
            sequence = row.sequence
            count = self._max_drafts(sequence)
            if count > 0 and self._proposer is not None:
                proposal = self._proposer.propose(sequence, count)
                if proposal.tokens and (drafts := self._possible(sequence, proposal.tokens)):
                    row.match_length = proposal.match_length
                    if sequence.seq_id not in self._shadows:
                        self._shadows.add(sequence, proposal.match_length, drafts)
                    proposed[sequence.seq_id] = drafts
        self._num_unseen = 0
        if rows:
            seconds = (self.clock() - started) / len(rows) * step.width
            average = self._average(self._lookup_seconds * step.width, seconds, step)
            self._lookup_seconds = average / step.width
        return proposed

    def _average(self, average: float, seconds: float, step: DraftStep) -> float:
        """Return the moving average of a part of a step. Anything longer than the step counts as
        its length, since the machine was interrupted.
        """
        return average + 0.1 * (min(seconds, self.costs.seconds(step.width)) - average)

    def _charge(
        self,
        charge: Callable[[str, float], None],
        row_seconds: float,
        rows: list[_DraftRow],
        step: DraftStep,
    ) -> None:
        """Charge tenants `row_seconds` per row, converted to tokens."""
        tokens = row_seconds * self._token_rate(step.width)
        for tenant, count in Counter([row.tenant for row in rows]).items():
            charge(tenant, tokens * count)

    def _draw(self, rows: list[_DraftRow], step: DraftStep) -> dict[int, list[int]]:
        """Draw drafts from a model, after choosing how many pay."""
        model = self.model
        if model is None or not model.is_healthy:
            return {}
        max_counts = {row.sequence.seq_id: self._max_drawn(row.sequence, model) for row in rows}
        counts = self._num_paying({key: n for key, n in max_counts.items() if n > 0}, step)
        if not counts:
            return {}
        sequences = {seq_id: self._rows[seq_id].sequence for seq_id in counts}
        unread = {key: model.num_unread_tokens(sequence) for key, sequence in sequences.items()}
        drawn = model.propose([(sequences[seq_id], count) for seq_id, count in counts.items()])
        if not (self._is_timed or self._planner.is_trial):
            tokens = (model.seconds - model.reading) * self._token_rate(step.width)
            total = sum(unread.values())
            for seq_id, seconds in unread.items():
                row, part = self._rows[seq_id], seconds / total if total else 1.0 / len(unread)
                self._losses.charge(row.tenant, tokens / len(counts))
                self._charge(self._losses.charge_reading, model.reading * part, [row], step)
                row.is_reading = seq_id not in drawn
        possible = {key: self._possible(sequences[key], drafts) for key, drafts in drawn.items()}
        return {seq_id: drafts for seq_id, drafts in possible.items() if drafts}

    def _possible(self, sequence: Sequence, drafts: list[int]) -> list[int]:
        """Return drafts up to the first invalid one: an adapter's vocabulary may be smaller."""
        if vocab_size := sequence.request.vocab_size:
            drafts = list(takewhile(vocab_size.__gt__, drafts))
        return self._allowed(sequence, drafts)

    def _max_drawn(self, sequence: Sequence, model: DraftProposer) -> int:
        """Return the maximum number of a model's drafts; 0: none."""
        count = min(self._max_drafts(sequence), model.max_drafts(sequence))
        return count if count > 0 and model.supports(sequence) else 0

    def record_outcome(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Record a row's verified drafts."""
        self._shadows.remove(sequence.seq_id)
        row = self._row(sequence)
        row.acceptance.update(row.match_length, num_drafts, num_accepted)
        self._losses.charge(row.tenant, -num_accepted)
        self._pause = 0, 0, 0

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Record a step of `seconds`, planning and drawing included. What one takes in which an
        encoder ran says nothing about others.
        """
        if self.model is not None:
            seconds -= self.model.seconds
            self.model.seconds = self.model.reading = 0.0
        tracking_seconds, self._tracking_seconds = self._tracking_seconds, 0.0
        seconds -= self._planning_seconds + tracking_seconds
        self._planning_seconds = 0.0
        if plan.encode:
            return
        if self._tracking is not None and not self.timing:
            rate = self._token_rate(len(plan.seq_ids)) if plan.seq_ids else 0.0
            self._tracking.charge(plan, seconds, tracking_seconds, self._losses, rate)
        num_drafts = sum(map(len, plan.drafts.values()))
        if not plan.num_prompt_tokens and plan.seq_ids:
            self.costs.record(plan.num_tokens, seconds)
            self._planner.record(num_drafts)
        if num_drafts and not self.timing:
            step = DraftStep(plan.num_decodes, num_drafts, plan.num_prompt_tokens)
            tokens = self._planner.draft_tokens(step)
            for seq_id, drafts in plan.drafts.items():
                count = min(len(drafts), self._planner.charged[seq_id])
                if count:
                    self._losses.charge(self._rows[seq_id].tenant, count * tokens)

    def reset(self, *, worker_too: bool = False) -> None:
        """Forget a draft model's cached sequences; `worker_too`: its memory was released."""
        if self.model is not None:
            self.model.reset(worker_too=worker_too)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless a draft model's block pool is consistent."""
        if self.model is not None:
            self.model.check_integrity()

    def _row(self, sequence: Sequence) -> _DraftRow:
        row = self._rows.get(sequence.seq_id)
        if row is None:
            tenant = sequence.request.message.tenant
            row = _DraftRow(sequence, tenant, AcceptanceEstimate(self._acceptance, tenant))
            self._rows[sequence.seq_id] = row
        return row

    def _max_drafts(self, sequence: Sequence) -> int:
        """Return the maximum number of drafts by the settings, too."""
        remaining = self._max_model_len - sequence.num_tokens
        return min(self._config.num_speculative_tokens, remaining - 1, max_drafts_of(sequence))

    def _num_paying(self, max_counts: dict[int, int], step: DraftStep) -> dict[int, int]:
        """Return the number of paying drafts by sequence id, each at most its `max_counts`."""
        offers = []
        for seq_id, count in max_counts.items():
            row = self._rows[seq_id]
            chances = row.acceptance.cautious_chances(row.match_length, count)
            offers.append(DraftOffer(chances, seq_id, row.tenant, *self._reading(row)))
        if self._is_timed:
            seq_ids = [offer.seq_id for offer in offers for _ in offer.chances]
            return Counter(seq_ids[: step.max_drafts])
        return self._planner.choose(offers, step)

    def _reading(self, row: _DraftRow) -> tuple[float, int]:
        """Return the seconds of reading a sequence that a draft model hasn't begun to read, and the
        number of tokens over which that must pay off.
        """
        if self.model is None or row.is_reading:
            return 0.0, 1
        remaining = row.sequence.max_output_tokens - row.sequence.num_output_tokens
        num_tokens = max(1, min(remaining, _MAX_READING_TOKENS))
        return self.model.num_unread_tokens(row.sequence), num_tokens

    def _remove_finished(self) -> None:
        for seq_id, row in list(self._rows.items()):
            if row.sequence.finished:
                del self._rows[seq_id]
                self._losses.end_sequence(row.tenant)
                self._shadows.remove(seq_id)
                if (source := self.model or self._proposer) is not None:
                    source.forget(row.sequence)


def _rows_by_tenant(sequences: list[Sequence]) -> dict[str, int]:
    return Counter([sequence.request.message.tenant for sequence in sequences])


def max_drafts_of(sequence: Sequence) -> int:
    """Return how many drafts a sequence may have: none with beam search or prompt log
    probabilities. A step yields one token more than it accepts.
    """
    if sequence.request.message.sampling.use_beam_search or sequence.wants_prompt_logprobs:
        return 0
    remaining = sequence.max_output_tokens - sequence.num_output_tokens
    if sequence.request.remaining_tokens is not None:
        remaining = min(remaining, sequence.request.remaining_tokens)
    return remaining - 1


def make_drafter(
    config: EngineConfig,
    facts: ModelFacts,
    *,
    overlaps: bool,
    filter_drafts: Possible | None = None,
    host: DraftHost,
    state_blocks: Callable[[int], list[int]] = lambda _: [],
) -> Drafter | None:
    """Return the drafter for `config`; None without `speculative_config`.

    Args:
        overlaps: whether steps are planned before the previous step's tokens are known.
        filter_drafts: see `Drafter`.
        host: draft model or heads that were loaded with the model.
        state_blocks: see `KVCacheCoordinator.get_state_blocks`.

    Raises `ConfigError` if the model can't verify drafts.
    """
    if not config.speculative_config:
        return None
    settings = SpeculativeConfig.from_mapping(config.speculative_config)
    reads_encoder, obstacle = facts.encoder_length or facts.max_encoder_tokens, ""
    if facts.pooling is not None:
        obstacle = "the model generates no text"
    elif facts.stateful and not facts.states_in_blocks:
        obstacle = f"the state of {facts.architecture} can't be taken back to where a draft failed"
    elif reads_encoder and host.heads is not None:
        obstacle = (
            f"heads don't read what the encoder of {facts.architecture} reads; draft_model, ngram "
            "and suffix can be used"
        )
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
        model = DraftModelProposer(
            host.model,
            host.execute,
            config.block_size,
            config.max_num_seqs,
            facts.eos_token_ids,
            (lambda seq_id: [state_blocks(seq_id)]) if reads_encoder else (lambda _: []),
        )
    return Drafter(settings, facts.max_model_len, filter_drafts, model)
