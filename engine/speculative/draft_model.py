"""`DraftModelProposer`: drafts from a smaller model, which runs some tokens ahead of the target."""

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
    """Return the sampling parameters that drafts use: all of the target's except grammars and the
    caller's functions, which are applied to drafts later.

    `vocab_size`: vocabulary of the drafts; other tokens are left out.
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

#: Drafting is disabled after this many consecutive failures.
_MAX_FAILURES = 3
#: Weight of a new measurement in the average time per read token.
_NEW = 0.3
#: Replaces token ids that the draft model lacks.
_UNKNOWN = 0
#: Ids of a sequence's blocks, by KV cache group.
BlockIds = list[list[int]]


@dataclass(slots=True, eq=False)
class _Row:
    """The draft model's state of a sequence: `num_cached` of the sequence's tokens, then `drafts`.

    Attributes:
        encoder_tables: see `DraftModelProposer`, as of when the draft model got the sequence.
        computed: number of these tokens whose KV is computed.
        is_up_to_date: whether the planned step computes all remaining tokens of the sequence.
        num_wanted_drafts: number of drafts requested in this round.
    """

    sequence: Sequence
    encoder_tables: BlockIds
    num_cached: int = 0
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    is_up_to_date: bool = False
    num_wanted_drafts: int = 0

    def valid(self) -> int:
        """Return the number of computed tokens that agree with the sequence's current tokens."""
        matched = 0
        for draft, token in zip(
            self.drafts, self.sequence.token_ids[self.num_cached :], strict=False
        ):
            if draft != token:
                break
            matched += 1
        return min(self.computed, self.num_cached + matched)


class DraftModelProposer:
    """Drafts from a model with its own paged KV cache, for decoding sequences.

    The draft model reads (prefills) a sequence's prompt when the sequence first gets drafts, with
    at most `token_budget` tokens per step over all sequences, so that no step takes long. Its
    prefix cache keeps what finished or preempted sequences computed. Drafts are sampled as the
    target samples: with the same parameters and the same random number at each position, so that
    both choose the same token wherever their probabilities agree.

    Attributes:
        costs: times of its steps, by number of rows.
        seconds, reading, following: see `DraftProposer`.
    """

    def __init__(
        self,
        facts: DraftFacts,
        run: Callable[[StepPlan], StepResult],
        block_size: int,
        max_num_seqs: int,
        eos_token_ids: tuple[int, ...] = (),
        encoder_tables: Callable[[int], BlockIds] = lambda _: [],
    ) -> None:
        """`run`: executes a step of the model; `max_num_seqs`: maximum rows of its batch;
        `encoder_tables`: the target's blocks of the encoder states that a sequence attends to, by
        cross-attention group: the draft model has its own keys and values in blocks of these ids.
        """
        self._facts, self._encoder_tables = facts, encoder_tables
        states = facts.layout.state_group
        self._max_rows = min(max_num_seqs, states.num_blocks // 2) if states else max_num_seqs
        self._ends = frozenset(eos_token_ids)
        self._run = run
        # States at the ends of prompts aren't retained, so there is no prefix to reuse.
        self.kv = make_coordinator(
            facts.layout, facts.num_blocks, block_size, enable_caching=states is None
        )
        #: Not charged to any tenant: blocks are allocated in the order in which sequences are read.
        self._quota = self.kv.quotas.get("drafts")
        #: Least recently used first.
        self._rows: dict[int, _Row] = {}
        self._removed: list[int] = []
        self._step = 0
        self._failures = 0
        self.costs = StepTimes(is_draft=True)
        self.seconds = self.reading = 0.0
        self.following: HeadTracking | None = None
        #: Average seconds per read token, at the machine's initial speed.
        self._token_seconds = 0.0

    def propose(self, requests: list[tuple[Sequence, int]]) -> dict[int, list[int]]:
        """Return drafts by sequence id, at most the requested number for each."""
        started = time.perf_counter()
        try:
            return self._propose(requests)
        except Exception:  # a failing draft model must not fail the target's step
            self._failures += 1
            log.exception("The draft model failed; %d in a row", self._failures)
            self.reset()
            return {}
        finally:
            self.seconds = time.perf_counter() - started

    @property
    def is_healthy(self) -> bool:
        """Whether the model may draft: it hasn't failed too often."""
        return self._failures < _MAX_FAILURES

    def supports(self, sequence: Sequence) -> bool:
        """Whether the model can read the sequence."""
        return not sequence.request.encoder_inputs

    def max_drafts(self, sequence: Sequence) -> int:
        """Return the number of drafts that fit into the model's context."""
        return self._facts.max_model_len - sequence.num_tokens

    def num_unread_tokens(self, sequence: Sequence) -> float:
        """See `DraftProposer`. Doesn't consider cached prefixes, which are only looked up when the
        sequence is read. The newest one or two tokens don't count: every draft computes them.
        """
        row = self._rows.get(sequence.seq_id)
        num_unread = sequence.num_tokens - (0 if row is None else row.valid())
        return 0.0 if num_unread <= 2 else num_unread * self._token_seconds * self.costs.speed.value

    def forget(self, sequence: Sequence) -> None:
        """Free a sequence's blocks; their content stays in the prefix cache."""
        row = self._rows.pop(sequence.seq_id, None)
        if row is not None:
            self.kv.free(sequence.seq_id, self._quota)
            self._removed.append(sequence.seq_id)

    def reset(self, *, worker_too: bool = False) -> None:
        """Forget all sequences and the cache; `worker_too`: the worker's batch is gone too."""
        for row in list(self._rows.values()):
            self.forget(row.sequence)
        self.kv.pool.reset_prefix_cache()
        if self.kv.states is not None:
            self.kv.states.pop_copies()  # their blocks are free now
        if worker_too:
            self._removed.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the block pool is consistent."""
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
        if plan.num_tokens <= 2 * len(plan.seq_ids):  # (nearly) all rows decode
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
        """Whether a row needs one more draft."""
        return 0 < len(row.drafts) < row.num_wanted_drafts and row.drafts[-1] not in self._ends

    def _draw(self, rows: list[_Row]) -> list[_Row]:
        """Draw one more draft for each row."""
        started, plan = time.perf_counter(), self._new_plan()
        plan.seq_ids = [row.sequence.seq_id for row in rows]
        plan.num_scheduled, plan.num_samples = [1] * len(rows), [1] * len(rows)
        for row in rows:
            row.computed += 1
        going = self._append_drafts(self._execute(plan), rows)
        self.costs.record(len(rows), time.perf_counter() - started)
        return going

    def _append_drafts(self, result: StepResult, rows: list[_Row]) -> list[_Row]:
        """Append the sampled drafts; return the rows that may continue."""
        going = []
        for row, token_ids in zip(rows, result.token_ids, strict=True):
            if row.sequence.seq_id in result.errors:
                self.forget(row.sequence)  # e.g. NaN: it would be read again from the start
                continue
            if token_ids and token_ids[0] >= self._facts.vocab_size:
                row.num_wanted_drafts = 0  # the target lacks this token id
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
        """Schedule a sequence's unread tokens, with blocks for `count` drafts; return None if the
        budget or the blocks don't suffice.
        """
        seq_id, total = sequence.seq_id, sequence.num_tokens
        encoder_tables = self._encoder_tables(seq_id)
        if (row := self._rows.get(seq_id)) and row.encoder_tables != encoder_tables:
            self.forget(sequence)  # it was preempted, and its states are elsewhere now
        row, prefix = self._rows.pop(seq_id, None), None
        if row is None:
            prefix = self.kv.get_computed_blocks(sequence)
            computed = prefix.num_tokens
        else:
            self._rows[seq_id] = row  # most recently used
            if self.kv.states is not None:
                # Return to the state before the drafts, whether or not they were accepted.
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
            row = self._rows[seq_id] = _Row(sequence, encoder_tables)
            plan.new.append(self._described(row, computed))
        else:
            rest = self._readable(sequence, row.num_cached)
            plan.rewound.append(RewoundSequence(seq_id, row.num_cached, rest, computed))
            if new_blocks:
                added = _ids(new_blocks) + [[] for _ in encoder_tables]
                plan.new_blocks.append((seq_id, added))
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
        """Allocate blocks for a sequence, evicting the least recently used idle sequences."""
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
        """Return a sequence's tokens from `start` on, with `_UNKNOWN` for tokens that its adapter
        adds: the draft model lacks them, and drafts after them are verified like any other.
        """
        token_ids, vocab_size = sequence.token_ids[start:], self._facts.vocab_size
        if sequence.request.vocab_size <= vocab_size:
            return token_ids
        return [token if token < vocab_size else _UNKNOWN for token in token_ids]

    def _described(self, row: _Row, computed: int) -> NewSequence:
        sequence = row.sequence
        return NewSequence(
            seq_id=sequence.seq_id,
            token_ids=self._readable(sequence),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=computed,
            block_ids=_ids(self.kv.get_block_tables(sequence.seq_id)) + row.encoder_tables,
            num_encoder_states=sequence.num_encoder_states,
            sampling=draft_sampling(sequence.request.sampling, self._facts.vocab_size),
            seed=sequence.seed,
        )


def _ids(tables: BlockTables) -> BlockIds:
    return [[block.block_id for block in table] for table in tables]
