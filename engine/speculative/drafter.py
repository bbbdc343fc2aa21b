"""`Drafter`: decides how many drafts each row of a step gets."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

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
from engine.speculative.step_times import StepTimes

Possible = Callable[[Sequence, list[int]], list[int]]
#: Reading a sequence must pay off within this many tokens, since more may never be generated.
_MAX_READING_TOKENS = 64
#: Maximum fraction of the steps' time for planning while no drafts pay.
_PLANNING_SHARE = 0.003
#: A step counts as at most this many times slower than expected.
_MAX_OUTLIER = 1.75


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

    `AcceptanceEstimate` estimates acceptance, `StepTimes` the time of a wider step, and `Planner`
    chooses. What was learned grows old, so that drafts are tried again; `LossBound` limits each
    tenant's loss by such tries, and by texts that mislead the estimates. In a full batch, whose
    time grows in proportion to its width, there are no drafts and no lookups.

    Attributes:
        clock: returns seconds.
        timing: while true, a draft model drafts whether or not that pays, so that it is timed.
        costs: times of the target model's steps.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        max_model_len: int,
        possible: Possible | None = None,
        model: DraftProposer | None = None,
    ) -> None:
        """`possible`: cuts drafts to those that the sequence's constraints allow; `model`: computes
        drafts; None: drafts are looked up in text.
        """
        self._config = config
        self._allowed = possible or (lambda sequence, drafts: drafts)
        self._max_model_len = max_model_len
        self.model = model
        self._proposer: Proposer | None = None
        self.clock: Callable[[], float] = time.perf_counter
        self.timing = False
        self.costs = StepTimes(speed=None if model is None else model.costs.speed)
        #: Seconds of planning and of tracking in the last step, without a model's drawing.
        self._planning_seconds, self._tracking_seconds = 0.0, 0.0
        self.clear_history()

    def clear_history(self) -> None:
        """Forget texts, acceptance and losses, but not the times of steps."""
        self._acceptance = TenantAcceptance(is_model=self.model is not None)
        self._rows: dict[int, _DraftRow] = {}
        self._losses = LossBound()
        #: Batch in which no draft paid: its size, its last row, and the step at which it ends.
        self._pause = 0, 0, 0.0
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
        width = len(decoding)
        step = DraftStep(width, min(max_drafts, self.costs.max_width - width), num_prompt_tokens)
        if not decoding or 0 < self._config.disable_by_batch_size <= width or step.max_drafts < 1:
            return {}
        size, last, end = self._pause
        is_paused = self._acceptance.step < end and (size, last) == (width, decoding[-1].seq_id)
        if not self._is_timed and (is_paused or not self._planner.can_pay(step)):
            return {}
        started = self.clock()
        self._remove_finished()
        tenants = _rows_by_tenant(decoding)
        self._losses.begin_step(self._acceptance.step, tenants)
        drafting = {
            tenant for tenant in tenants if self._is_timed or self._losses.can_draft(tenant)
        }
        rows = [self._row(sequence) for sequence in decoding if self._is_tracked(sequence)]
        rows = [row for row in rows if row.tenant in drafting]
        if not rows:
            return {}
        drafts = self._look_up(rows, step) if self.model is None else self._draw(rows, step)
        self._planning_seconds = self.clock() - started
        if self.model is not None:
            self._planning_seconds -= self.model.seconds
        # Anything longer than a step means that the machine was interrupted.
        share = min(1.0, self._planning_seconds / self.costs.seconds(width))
        for tenant, count in Counter([row.tenant for row in rows]).items():
            self._losses.charge(tenant, share * width * count / len(rows))
        if not drafts:
            end = self._acceptance.step + share / _PLANNING_SHARE
            self._pause = width, decoding[-1].seq_id, end
        return drafts

    def _is_tracked(self, sequence: Sequence) -> bool:
        """Whether a sequence may have drafts: if there is a layer head, it must track it."""
        return self._tracking is None or sequence.seq_id in self._tracking

    @property
    def _is_timed(self) -> bool:
        return self.timing and self.model is not None

    def _look_up(self, rows: list[_DraftRow], step: DraftStep) -> dict[int, list[int]]:
        """Return paying drafts from text."""
        proposed: dict[int, list[int]] = {}
        for row in rows:
            count = self._max_drafts(row.sequence)
            if count > 0 and self._proposer is not None:
                proposal = self._proposer.propose(row.sequence, count)
                if proposal.tokens and (drafts := self._possible(row.sequence, proposal.tokens)):
                    row.match_length = proposal.match_length
                    proposed[row.sequence.seq_id] = drafts
        counts = self._num_paying({key: len(drafts) for key, drafts in proposed.items()}, step)
        return {seq_id: proposed[seq_id][:count] for seq_id, count in counts.items()}

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
        if not self._is_timed:
            rate, total = self._token_rate(step.width), sum(unread.values())
            for seq_id, seconds in unread.items():
                row, part = self._rows[seq_id], seconds / total if total else 1.0 / len(unread)
                self._losses.charge(
                    row.tenant, (model.seconds - model.reading) * rate / len(unread)
                )
                self._losses.charge_reading(row.tenant, model.reading * part * rate)
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
        row = self._row(sequence)
        row.acceptance.update(row.match_length, num_drafts, num_accepted)
        self._losses.charge(row.tenant, -num_accepted)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Record a step of `seconds`, planning and drawing included."""
        if self.model is not None:
            seconds -= self.model.seconds
            self.model.seconds = self.model.reading = 0.0
        tracking_seconds, self._tracking_seconds = self._tracking_seconds, 0.0
        seconds -= self._planning_seconds + tracking_seconds
        self._planning_seconds = 0.0
        if self._tracking is not None and not self.timing:
            rate = self._token_rate(len(plan.seq_ids)) if plan.seq_ids else 0.0
            self._tracking.charge(plan, seconds, tracking_seconds, self._losses, rate)
        num_drafts = sum(map(len, plan.drafts.values()))
        if not plan.num_prompt_tokens and plan.seq_ids:
            self.costs.record(plan.num_tokens, seconds)
            self._planner.record(num_drafts)
        if num_drafts and not self.timing:
            step = DraftStep(plan.num_decodes, num_drafts, plan.num_prompt_tokens)
            price = self._planner.price(step, num_drafts)
            if not plan.num_prompt_tokens:
                without = self.costs.seconds(step.width)
                extra = min(seconds, _MAX_OUTLIER * self.costs.seconds(plan.num_tokens)) - without
                price = extra / without * step.width / num_drafts
            for seq_id, drafts in plan.drafts.items():
                self._losses.charge(self._rows[seq_id].tenant, len(drafts) * price)

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
        """Return the maximum number of drafts: a step yields one token more than it accepts."""
        if not can_verify_drafts(sequence):
            return 0
        remaining = sequence.max_output_tokens - sequence.num_output_tokens
        if sequence.request.remaining_tokens is not None:
            remaining = min(remaining, sequence.request.remaining_tokens)
        remaining = min(remaining, self._max_model_len - sequence.num_tokens)
        return min(self._config.num_speculative_tokens, remaining - 1)

    def _num_paying(self, max_counts: dict[int, int], step: DraftStep) -> dict[int, int]:
        """Return the number of paying drafts by sequence id, each at most its `max_counts`."""
        if self._is_timed:
            seq_ids = [seq_id for seq_id, count in max_counts.items() for _ in range(count)]
            return Counter(seq_ids[: step.max_drafts])
        offers, pending = [], Counter[str]()
        for seq_id, count in max_counts.items():
            row = self._rows[seq_id]
            reading = 0.0
            if self.model is not None and not row.is_reading:
                reading = self.model.num_unread_tokens(row.sequence)
                if reading and not self._losses.can_read(row.tenant, pending[row.tenant]):
                    continue
                pending[row.tenant] += reading * self._token_rate(step.width)  # type: ignore[assignment]
                remaining = row.sequence.max_output_tokens - row.sequence.num_output_tokens
                reading /= max(1, min(remaining, _MAX_READING_TOKENS))
            chances = row.acceptance.chances(row.match_length, count)
            offers.append(DraftOffer(chances, seq_id, row.tenant, reading))
        return self._planner.choose(offers, step)

    def _remove_finished(self) -> None:
        for seq_id, row in list(self._rows.items()):
            if row.sequence.finished:
                del self._rows[seq_id]
                self._losses.end_sequence(row.tenant)
                if (source := self.model or self._proposer) is not None:
                    source.forget(row.sequence)


def _rows_by_tenant(sequences: list[Sequence]) -> dict[str, int]:
    return Counter([sequence.request.message.tenant for sequence in sequences])


def can_verify_drafts(sequence: Sequence) -> bool:
    """Whether a sequence may have drafts: not with beam search or prompt log probabilities."""
    beams = sequence.request.message.sampling.use_beam_search
    return not (beams or sequence.wants_prompt_logprobs)


def make_drafter(
    config: EngineConfig,
    facts: ModelFacts,
    *,
    overlaps: bool,
    possible: Possible | None = None,
    host: DraftHost,
    state_blocks: Callable[[int], list[int]] = lambda _: [],
) -> Drafter | None:
    """Return the drafter for `config`; None without `speculative_config`.

    Args:
        overlaps: whether steps are planned before the previous step's tokens are known.
        possible: see `Drafter`.
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
    return Drafter(settings, facts.max_model_len, possible, model)
