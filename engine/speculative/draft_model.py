"""`DraftModelProposer`: a smaller model says what it would, some tokens ahead of the target."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.contract.sampling_params import SamplingParams
from engine.kv_cache import BlockTables, CachedPrefix, make_coordinator
from engine.scheduler import NewSequence, RewoundSequence, Sequence, StepPlan, StepResult
from engine.speculative.head_tracking import HeadTracking
from engine.speculative.interface import DraftFacts
from engine.speculative.step_times import StepTimes


def draft_sampling(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """What of the target's choice a draft follows: all but grammars and the caller's functions, of
    which drafts are told apart afterwards.

    `vocab_size`: of the drafts; other tokens are left out.
    """
    bias = {
        token: value for token, value in (params.logit_bias or {}).items() if token < vocab_size
    }
    allowed = [token for token in params.allowed_token_ids or () if token < vocab_size]
    bad = [words for words in params.bad_words_token_ids or () if max(words) < vocab_size]
    ends = [token for token in params.stop_token_ids or () if token < vocab_size]
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=bias or None,
        allowed_token_ids=allowed or None,
        bad_words_token_ids=bad or None,
        min_tokens=params.min_tokens,
        stop_token_ids=ends or None,
        ignore_eos=params.ignore_eos,
        max_tokens=None,
    )


log = logging.getLogger(__name__)

#: After so many failed steps one behind the other there are no more drafts.
_MAX_FAILURES = 3
#: The weight of a new step in what a token takes that is read.
_NEW = 0.3
#: What it reads for a token that it can't know.
_UNKNOWN = 0


@dataclass(slots=True, eq=False)
class _Row:
    """A sequence as the draft model has it: `num_cached` tokens of its own, then `drafts`.

    Attributes:
        computed: of all of these, those whose KV is there.
        is_up_to_date: the step that is being made leaves nothing of the sequence's own to compute.
        num_wanted_drafts: of this round.
    """

    sequence: Sequence
    num_cached: int = 0
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    is_up_to_date: bool = False
    num_wanted_drafts: int = 0

    def valid(self) -> int:
        """Computed tokens that are the sequence's, as far as that has come by now."""
        matched = 0
        for draft, token in zip(
            self.drafts, self.sequence.token_ids[self.num_cached :], strict=False
        ):
            if draft != token:
                break
            matched += 1
        return min(self.computed, self.num_cached + matched)


class DraftModelProposer:
    """Drafts of a model with a paged cache of its own, over the sequences that decode.

    A sequence's prompt is read when it is first to get drafts, `token_budget` tokens of all of them
    in a step, so that nobody waits long; whatever of its tokens a finished neighbour, or itself
    before a preemption, left in the cache is there already. What it draws it draws as the target
    would: with the same parameters and, at each place, the same random number, so that both choose
    alike where their probabilities are alike.

    Attributes:
        costs: of its steps, by rows.
        seconds, reading, following: see `DraftProposer`.
    """

    def __init__(
        self,
        facts: DraftFacts,
        run: Callable[[StepPlan], StepResult],
        block_size: int,
        max_num_seqs: int,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        """`run`: runs its steps; `max_num_seqs`: rows of its batch."""
        self._facts = facts
        states = facts.layout.state_group
        self._max_rows = min(max_num_seqs, states.num_blocks // 2) if states else max_num_seqs
        self._ends = frozenset(eos_token_ids)
        self._run = run
        # States at the ends of prompts aren't kept, so that there is no prefix to go on from.
        self.kv = make_coordinator(
            facts.layout, facts.num_blocks, block_size, enable_caching=states is None
        )
        #: Nobody pays for these blocks: whoever is read first has them.
        self._quota = self.kv.quotas.get("drafts")
        #: Least lately used first.
        self._rows: dict[int, _Row] = {}
        self._removed: list[int] = []
        self._step = 0
        self._failures = 0
        self.costs = StepTimes(is_draft=True)
        self.seconds = self.reading = 0.0
        self.following: HeadTracking | None = None
        #: Of a token that is read, at the pace that the machine had at first.
        self._token_seconds = 0.0

    def propose(self, requests: list[tuple[Sequence, int]]) -> dict[int, list[int]]:
        """Drafts by sequence id, at most as many as are wanted for each."""
        started = time.perf_counter()
        try:
            return self._propose(requests)
        except Exception:  # whatever it is, the target goes on without drafts
            self._failures += 1
            log.exception("The draft model failed; %d in a row", self._failures)
            self.reset()
            return {}
        finally:
            self.seconds = time.perf_counter() - started

    @property
    def is_healthy(self) -> bool:
        """Whether there may be drafts."""
        return self._failures < _MAX_FAILURES

    def supports(self, sequence: Sequence) -> bool:
        """Whether it can read a sequence."""
        return not sequence.request.encoder_inputs

    def max_drafts(self, sequence: Sequence) -> int:
        """Drafts of a sequence that its context has room for."""
        return self._facts.max_model_len - sequence.num_tokens

    def num_unread_tokens(self, sequence: Sequence) -> float:
        """See `DraftProposer`. What others left in its cache is found out when it reads; what a
        draft
        reads anyway, its newest token or two, is no reading.
        """
        row = self._rows.get(sequence.seq_id)
        num_unread = sequence.num_tokens - (0 if row is None else row.valid())
        return 0.0 if num_unread <= 2 else num_unread * self._token_seconds * self.costs.speed.value

    def forget(self, sequence: Sequence) -> None:
        """The sequence has left; what was read of it stays cached."""
        row = self._rows.pop(sequence.seq_id, None)
        if row is not None:
            self.kv.free(sequence.seq_id, self._quota)
            self._removed.append(sequence.seq_id)

    def reset(self, *, worker_too: bool = False) -> None:
        """Forget all sequences and the cache; `worker_too`: the batch has gone as well."""
        for row in list(self._rows.values()):
            self.forget(row.sequence)
        self.kv.pool.reset_prefix_cache()
        if self.kv.states is not None:
            self.kv.states.pop_copies()  # between blocks that are free now
        if worker_too:
            self._removed.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless its pool's books balance."""
        self.kv.check_integrity(dict.fromkeys(self._rows, "drafts"))

    def _propose(self, requests: list[tuple[Sequence, int]]) -> dict[int, list[int]]:
        plan = self._new_plan()
        budget, rows = self._facts.token_budget, []
        busy = {sequence.seq_id for sequence, _ in requests}
        for sequence, count in requests:
            row = self._scheduled(plan, sequence, count, budget, busy)
            if row is not None:
                budget -= plan.num_scheduled[-1]
                rows.append(row)
        if not rows:
            return {}
        started = time.perf_counter()
        rows = self._append_drafts(self._execute(plan), rows)
        took = time.perf_counter() - started
        if plan.num_tokens <= 2 * len(plan.seq_ids):  # all of them decode, or nearly so
            self.costs.record(len(plan.seq_ids), took)
        else:
            self.reading = took
            token_seconds = took / plan.num_tokens / self.costs.speed.value
            self._token_seconds += _NEW * (token_seconds - self._token_seconds)
        for row in rows:
            sequence = row.sequence
            num_own_tokens = min(row.computed, row.num_cached)
            self.kv.cache_full_blocks(sequence, num_own_tokens)
        drawing = [row for row in rows if row.is_up_to_date]
        while drawing := [row for row in drawing if self._goes_on(row)]:
            drawing = self._draw(drawing)
        self._failures = 0
        return {row.sequence.seq_id: list(row.drafts) for row in rows if row.drafts}

    def _goes_on(self, row: _Row) -> bool:
        """Whether one more draft is wanted behind those that a row has."""
        return 0 < len(row.drafts) < row.num_wanted_drafts and row.drafts[-1] not in self._ends

    def _draw(self, rows: list[_Row]) -> list[_Row]:
        """One more draft for each."""
        started, plan = time.perf_counter(), self._new_plan()
        plan.seq_ids = [row.sequence.seq_id for row in rows]
        plan.num_scheduled, plan.num_samples = [1] * len(rows), [1] * len(rows)
        for row in rows:
            row.computed += 1
        going = self._append_drafts(self._execute(plan), rows)
        self.costs.record(len(rows), time.perf_counter() - started)
        return going

    def _append_drafts(self, result: StepResult, rows: list[_Row]) -> list[_Row]:
        """Take over what was drawn; the rows that may go on."""
        going = []
        for row, token_ids in zip(rows, result.token_ids, strict=True):
            if row.sequence.seq_id in result.errors:
                self.forget(row.sequence)  # NaN, say: it's read anew, if ever
                continue
            if token_ids and token_ids[0] >= self._facts.vocab_size:
                row.num_wanted_drafts = 0  # an id that the target lacks
            elif token_ids:
                row.drafts.append(token_ids[0])
            going.append(row)
        return going

    def _execute(self, plan: StepPlan) -> StepResult:
        plan.removed = self._removed
        if self.kv.states is not None:
            plan.block_copies = self.kv.states.pop_copies()
            plan.checkpoints = self.kv.states.pop_checkpoints()
        result = self._run(plan)
        self._removed = []
        return result

    def _new_plan(self) -> StepPlan:
        self._step += 1
        return StepPlan(self._step)

    def _scheduled(
        self, plan: StepPlan, sequence: Sequence, count: int, budget: int, busy: set[int]
    ) -> _Row | None:
        """Put what a sequence is behind into the plan, and room for `count` drafts; None where
        budget or blocks don't suffice.
        """
        seq_id, total = sequence.seq_id, sequence.num_tokens
        row, prefix = self._rows.pop(seq_id, None), None
        if row is None:
            prefix = self.kv.get_computed_blocks(sequence)
            computed = prefix.num_tokens
        else:
            self._rows[seq_id] = row  # used lately
            if self.kv.states is not None:
                # The state is taken back to where its drafts began, right or wrong.
                self.kv.states.rewind(seq_id, row.num_cached)
                self.kv.start_step()
                row.computed, row.drafts = min(row.computed, row.num_cached), []
            computed = row.valid()
        num_unread = min(total - computed, budget)
        caught_up = computed + num_unread == total
        num_tokens = num_unread + (count - 1 if caught_up else 0)
        if num_unread < 1:
            return None
        new_blocks = self._allocate(sequence, computed, num_tokens, busy, prefix)
        if new_blocks is None:
            return None
        if row is None:
            row = self._rows[seq_id] = _Row(sequence)
            plan.new.append(self._described(sequence, computed))
        else:
            rest = self._readable(sequence, row.num_cached)
            plan.rewound.append(RewoundSequence(seq_id, row.num_cached, rest, computed))
            if new_blocks:
                plan.new_blocks.append((seq_id, _ids(new_blocks)))
        if self.kv.states is not None and caught_up and count > 1:
            self.kv.states.keep_until_verified(sequence, self._quota, total, 1)
        row.num_cached, row.computed, row.drafts = total, computed + num_unread, []
        row.is_up_to_date, row.num_wanted_drafts = caught_up, count
        plan.seq_ids.append(seq_id)
        plan.num_scheduled.append(num_unread)
        plan.num_samples.append(int(caught_up))
        return row

    def _allocate(
        self,
        sequence: Sequence,
        computed: int,
        count: int,
        busy: set[int],
        prefix: CachedPrefix | None,
    ) -> BlockTables | None:
        """Blocks for a sequence that has a row or can get one; those idle longest give theirs."""
        while True:
            if sequence.seq_id in self._rows or len(self._rows) < self._max_rows:
                blocks = self.kv.allocate_slots(
                    sequence, self._quota, computed, count, prefix,
                    lookahead=self.kv.states is None,
                )  # fmt: skip
                if blocks is not None:
                    return blocks
            idle = next((row for key, row in self._rows.items() if key not in busy), None)
            if idle is None:
                return None
            self.forget(idle.sequence)

    def _readable(self, sequence: Sequence, start: int = 0) -> list[int]:
        """A sequence's tokens from `start` on, another one in the place of each that its adapter
        brings: the draft model has no such token, and what it says behind one is checked as ever.
        """
        token_ids, vocab_size = sequence.token_ids[start:], self._facts.vocab_size
        if sequence.request.vocab_size <= vocab_size:
            return token_ids
        return [token if token < vocab_size else _UNKNOWN for token in token_ids]

    def _described(self, sequence: Sequence, computed: int) -> NewSequence:
        return NewSequence(
            seq_id=sequence.seq_id,
            token_ids=self._readable(sequence),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=computed,
            block_ids=_ids(self.kv.get_block_tables(sequence.seq_id)),
            sampling=draft_sampling(sequence.request.sampling, self._facts.vocab_size),
            seed=sequence.seed,
        )


def _ids(tables: BlockTables) -> list[list[int]]:
    """Block ids of tables."""
    return [[block.block_id for block in table] for table in tables]
