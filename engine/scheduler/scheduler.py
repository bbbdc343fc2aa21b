"""The scheduler: one token budget a step, dealt to running sequences first, then to waiting ones.

There is no prefill phase and no decode phase (after vLLM's V1 scheduler): a sequence has
`num_computed_tokens` and `num_tokens`, and every step deals out a budget so that the first catches
up with the second. Chunked prefill, mixed batches, prefix hits, resumption: all that one rule.
"""

from __future__ import annotations

from dataclasses import replace

from engine.contract.config import EngineConfig
from engine.contract.errors import KVPoolTooSmall
from engine.contract.protocol import EngineRequest
from engine.kv_cache import KVLayout, TenantQuota, make_coordinator
from engine.scheduler.admitter import Admitter
from engine.scheduler.ahead import note_ahead
from engine.scheduler.drafts import DraftRows
from engine.scheduler.limits import StepLimits
from engine.scheduler.plan import StepPlan, decodes
from engine.scheduler.policies import make_queue
from engine.scheduler.prefill_room import PrefillRoom, PromptLoad
from engine.scheduler.prefill_share import LEAST_OF_A_START, PrefillShare
from engine.scheduler.running import RunningSet
from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.step_builder import StepBuilder
from engine.scheduler.turns import ShortStep, StepWork, Turns


class Scheduler:
    """Owns the waiting queue, the running list and the KV cache."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        token_budget: int,
        prefill_share: PrefillShare | None = None,
        layout: KVLayout | None = None,
        max_model_len: int = 0,
    ) -> None:
        """Settings that were resolved beside the model.

        `num_blocks`: the pool's size; `token_budget`: max_num_batched_tokens; `prefill_share`:
        prompt tokens of a step in which others decode, None for no limit; `layout`: the model's
        KV cache groups, None for full attention in all layers; `max_model_len`: its context, 0
        when nobody asks.
        """
        self.config = config
        self.max_num_seqs = config.max_num_seqs
        self.limits = StepLimits(
            token_budget,
            chunk=config.long_prefill_token_threshold or token_budget,
            chunked=config.enable_chunked_prefill,
            share=prefill_share or PrefillShare(token_budget),
        )
        self.kv = make_coordinator(
            layout, num_blocks, config.block_size, config.enable_prefix_caching
        )
        #: The longest sequence that can ever run.
        self.capacity_tokens = self.kv.capacity(num_blocks, self.limits.most_at_once, max_model_len)
        if max_model_len:
            longest = self.kv.most_blocks(max_model_len, self.limits.most_at_once)
            self.kv.quotas.shared = min(num_blocks, longest)
        self.waiting = make_queue(config)
        by_priority = config.scheduling_policy != "fcfs"
        self._runs = RunningSet(self.kv, self.waiting, by_priority)
        self.running = self._runs.sequences
        self.drafts = DraftRows(self.kv, self.waiting, self._runs.quota_of)
        self._admitter = Admitter(config, self.kv, self.waiting, self._runs, self.limits)
        self._turns = Turns(self.kv.quotas, self.waiting, self._runs, self.limits)
        #: What was scheduled last.
        self._plan = StepPlan(0)
        #: Set while the step that is being dealt is held short.
        self._short: ShortStep | None = None
        self._max_model_len = max_model_len
        #: Steps that were scheduled so far.
        self.num_steps = 0
        #: Work for prompts in the step that was scheduled last.
        self.prompt_load = PromptLoad()
        self._appended: list[tuple[int, int]] = []
        #: Who has steps of its own until it brings a token, from its first one on.
        self._lone: Sequence | None = None
        self._was_alone = False

    def concurrency(self, num_tokens: int) -> float:
        """How many sequences of so many tokens the pool holds at once."""
        return self.kv.pool.num_blocks / self.kv.most_blocks(num_tokens, self.limits.most_at_once)

    @property
    def num_preemptions(self) -> int:
        """How often a running sequence gave all of its blocks."""
        return self._runs.num_preemptions

    def reset_counts(self) -> None:
        """Count preemptions and prefix hits anew."""
        self._runs.num_preemptions = 0
        self.kv.num_query_tokens = self.kv.num_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or len(self.waiting) or self._runs.removed)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        quota = self.note_tenant(sequence.request.message)
        if sequence.index == 0:
            note_ahead(sequence, quota, self.running, self.waiting)
        quota.sequences += 1
        cached = len(self._runs.find_cached_prefix(sequence)[0]) * self.kv.block_size
        self.waiting.push(sequence, cached)

    def note_tenant(self, message: EngineRequest) -> TenantQuota:
        """Take over what a request says of its tenant's share of the pool."""
        return self.kv.quotas.note(
            message.tenant,
            message.weight,
            message.kv_reserved_fraction,
            message.kv_max_fraction,
        )

    def capacity_of(self, message: EngineRequest) -> int:
        """The longest sequence, in tokens, that the request's tenant can ever run as of now."""
        blocks = self.kv.quotas.limit(self.note_tenant(message))
        return self.kv.capacity(blocks, self.limits.most_at_once, self._max_model_len)

    def quota_of(self, sequence: Sequence) -> TenantQuota:
        """Who pays for the sequence's blocks."""
        return self._runs.quota_of(sequence)

    def schedule(self) -> tuple[StepPlan, list[Sequence]]:
        """Deal one step's budget.

        Returns the plan and its sequences in the plan's order. Their computed counts already
        include the step's tokens.
        """
        self.num_steps += 1
        if self.kv.quotas.reserving:
            self._admitter.claim_reserves()
        builder = StepBuilder(self.num_steps, self.limits.token_budget, self._prefill_room())
        if not self._deal_alone(builder):
            self._deal_shared(builder)
        self.prompt_load = builder.prefill.load
        builder.plan.removed = self._runs.take_removed()
        self.drafts.add(builder)
        builder.plan.appended, self._appended = self._appended, []
        self._plan = builder.plan
        return builder.plan, builder.scheduled

    def _deal_shared(self, builder: StepBuilder) -> None:
        """Give the step to all, or, where it's held short, to those whose turn it is."""
        if self._short is not None:
            self._deal_short(builder, self._short)
        else:
            self._admitter.deal_prompts(builder, self._schedule_decodes(builder, set()))

    def _deal_short(self, builder: StepBuilder, short: ShortStep) -> None:
        """Give a short step to those whose turn it is. Prompts of theirs that can't start, for want
        of seats or blocks, leave tokens: rows that would sit out get these.
        """
        own = replace(builder.prefill, left=short.own, least=short.own)
        builder.rooms = dict.fromkeys((quota.name for quota in short.over), own)
        resting = self._turns.resting(short)
        self._admitter.deal_prompts(builder, self._schedule_decodes(builder, set(resting)))
        self._turns.note_prompts(short, builder.prefill.left)
        for sequence in resting[: max(0, int(own.left))]:
            self._deal_early(builder, sequence)
        # Drafts make a step longer, too.
        spare = max(0, short.whole - builder.plan.num_tokens)
        builder.budget = min(builder.budget, spare)

    def _deal_early(self, builder: StepBuilder, sequence: Sequence) -> None:
        """Deal to a row that would sit out, unless another would have to give blocks for it.

        One that gave its blocks and was started again has its tokens of this step already.
        """
        ended = sequence.num_placeholders and sequence.ends_in_flight
        runs = sequence.status is Status.RUNNING and sequence is not self._runs_alone()
        if not runs or ended or sequence in builder or builder.budget <= 0:
            return
        quota, computed = self._runs.quota_of(sequence), sequence.num_computed_tokens
        if self.kv.can_allocate(sequence.seq_id, quota, computed, 1):
            self._runs.grow(builder, self.running.index(sequence), 1)
            self._turns.note_turn(sequence)

    @property
    def isolates(self) -> bool:
        """Whether a step is, or comes next, that nothing may run beside, no other step either."""
        head = self.waiting.peek()
        return self._runs_alone() is not None or (head is not None and head.isolated)

    def _runs_alone(self) -> Sequence | None:
        """Who has begun with steps of its own and hasn't brought a token."""
        lone = self._lone
        if lone is not None and not (lone.isolated and lone.status is Status.RUNNING):
            lone = self._lone = None
        return lone

    def _deal_alone(self, builder: StepBuilder) -> bool:
        """Give the step to who must have steps of its own; False: to the others.

        They have every second one: of many such prompts none keeps them from their tokens.
        """
        lone = self._runs_alone()
        others = len(self.running) > (lone is not None)
        self._was_alone = not (self._was_alone and others) and self._go_alone(builder, lone)
        return self._was_alone

    def _go_alone(self, builder: StepBuilder, lone: Sequence | None) -> bool:
        """`lone`: who has begun so; None: the queue's head may. False: nobody may, or has room."""
        if lone is not None:
            builder.prefill = PrefillRoom(builder.budget)  # nobody decodes beside it
            self._admitter.go_on(builder, lone)
            return True
        head = self.waiting.peek()
        if head is None or not head.isolated or self._admitter.full:
            return False
        shared, builder.prefill = builder.prefill, PrefillRoom(builder.budget)
        if self._admitter.admit(builder, head):
            self._lone = head
            return True
        builder.prefill = shared
        return False

    # -- beams --------------------------------------------------------------------------------

    def add_parked(self, sequence: Sequence) -> None:
        """Take note of a sequence that will begin with `restart`."""
        self.note_tenant(sequence.request.message).sequences += 1
        sequence.status = Status.PARKED

    def append(self, sequence: Sequence, token_id: int) -> None:
        """A sequence gets a token that wasn't sampled for it."""
        sequence.token_ids.append(token_id)
        if sequence.status is Status.RUNNING:
            self._appended.append((sequence.seq_id, token_id))
        else:
            self.restart(sequence)

    def restart(self, sequence: Sequence) -> None:
        """A sequence got other tokens altogether: it begins anew, ahead of those that never ran."""
        if sequence.status is Status.RUNNING:
            self._runs.take_off(sequence)
        if sequence.status is not Status.PREEMPTED:
            sequence.status = Status.PREEMPTED
            self.waiting.push_back(sequence)

    def park(self, sequence: Sequence) -> None:
        """Take a sequence's blocks, if it runs, and leave it out until it's restarted.

        One that is queued stays so; it can be parked once it runs.
        """
        if sequence.status is Status.RUNNING:
            self._runs.take_off(sequence)
            sequence.status = Status.PARKED

    def park_idle(self) -> bool:
        """When nothing could be scheduled: park a sequence that waits for others. False: none."""
        for sequence in reversed(self.running):
            idle = sequence.num_computed_tokens == len(sequence.token_ids)
            if idle and sequence.request.searches:
                self.park(sequence)
                return True
        return False

    # -- ends and failures --------------------------------------------------------------------

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | None = None) -> None:
        """Take a sequence out wherever it stands and free its blocks at once."""
        self._runs.finish(sequence, reason, stop_reason)

    def take_refused(self) -> list[tuple[Sequence, KVPoolTooSmall]]:
        """Sequences that ended because their tenant's limit can't hold them any more."""
        return self._runs.take_refused()

    def undo(self, *steps: tuple[StepPlan, list[Sequence]]) -> None:
        """Take back a step that failed, and those after it that were planned already: nothing that
        they computed counts or stays cached.

        All of their sequences go back to the queue and will each run in a step of their own, so
        that the one to blame fails alone.
        """
        counts: dict[Sequence, int] = {}
        for plan, scheduled in steps:
            for sequence, count in zip(scheduled, plan.num_scheduled, strict=True):
                counts[sequence] = counts.get(sequence, 0) + count
        for sequence, count in reversed(counts.items()):
            sequence.num_placeholders = 0
            if sequence.status is Status.RUNNING:
                self._runs.forget(sequence, sequence.num_computed_tokens - count)
                sequence.isolated = True
                self._runs.preempt(sequence)
            else:
                # It left while its step was being run, and its blocks may be anyone's by now.
                self.kv.forget_all(sequence.block_hashes)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the pool's books balance, only what runs holds blocks, and no
        sequence stands twice in the plan that was made last.
        """
        seq_ids = self._plan.seq_ids
        if len(set(seq_ids)) != len(seq_ids):
            raise RuntimeError(f"A sequence stands twice in step {self._plan.step}: {seq_ids}.")
        self.kv.check_integrity(
            {sequence.seq_id: sequence.request.message.tenant for sequence in self.running}
        )

    def _schedule_decodes(self, builder: StepBuilder, resting: set[Sequence]) -> list[Sequence]:
        """Running sequences that decode, in order, but for those that rest; returns the others,
        which have prompt left.
        """
        begun: list[Sequence] = []
        lone = self._runs_alone()
        if self.config.scheduling_policy != "fcfs":
            # So that the lowest priority is always the last.
            self.running.sort(key=lambda sequence: (sequence.request.priority, sequence.seq_id))
        index = 0
        block_size = self.config.block_size
        edges = (0, block_size - 1)
        while index < len(self.running) and builder.budget > 0:
            sequence = self.running[index]
            computed = sequence.num_computed_tokens
            pending = len(sequence.token_ids) + sequence.num_placeholders - computed
            ended = sequence.num_placeholders and sequence.ends_in_flight
            if sequence is lone or ended or sequence in resting:
                index += 1
                continue
            decode = decodes(pending)
            began = computed >= sequence.num_prompt_tokens
            if decode and began and computed % block_size not in edges:
                # The usual decode: it neither needs a block nor fills one.
                builder.deal_decode(sequence)
                index += 1
                continue
            if not decode:
                if pending:
                    begun.append(sequence)
                index += 1
                continue
            index = self._runs.grow(builder, index, 1)
        return begun

    def preempt(self, sequence: Sequence) -> None:
        """Free a running sequence's blocks and queue it again; its tokens are recomputed later."""
        self._runs.preempt(sequence)

    def preempt_all(self) -> None:
        """Free all blocks: what runs is queued again, in its order."""
        for sequence in reversed(list(self.running)):
            self._runs.preempt(sequence)

    def _prefill_room(self) -> PrefillRoom:
        """Prompt tokens that this step may hold: the budget, unless a sequence decodes in it."""
        share, budget = self.limits.share, self.limits.token_budget
        self._short = None
        if not share.full_at and share.most >= budget:  # no bound: nothing to count
            return PrefillRoom(budget)
        work = StepWork.of(self.running)
        room = budget
        if work.rows:
            room = min(share.of(work.rows, work.pending + self.waiting.num_tokens), budget)
        self._short = self._turns.shorten(work, room)
        if self._short is not None:
            # `PrefillShare.whole` is by what steps took, with all that attention read.
            room = self._short.others
            return PrefillRoom(room, room, LEAST_OF_A_START, share.reach)
        if not work.rows:
            return PrefillRoom(budget)
        least = min(share.least_of(work.rows), budget)
        return PrefillRoom(room, least, LEAST_OF_A_START, share.reach)
