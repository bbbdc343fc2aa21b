"""The scheduler: one token budget per step, for running sequences first, then for waiting ones.

There is no prefill phase and no decode phase (after vLLM's V1 scheduler): a sequence has
`num_computed_tokens` and `num_tokens`, and every step spends a token budget so that the first
catches up with the second. Chunked prefill, mixed batches, prefix hits and resumption all follow
from that one rule.
"""

from __future__ import annotations

import time

import msgspec

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import KVPoolTooSmall
from engine.contract.messages import MAX_NAMED, EngineRequest
from engine.kv_cache import CachedPrefix, KVCacheConfig, TenantQuota, make_coordinator
from engine.kv_transfer.base import KVConnectorBase
from engine.scheduler.decode_rotation import DecodeRotation
from engine.scheduler.draft_scheduler import DraftScheduler
from engine.scheduler.encoder_cache import EncoderCacheManager, encoder_capacity
from engine.scheduler.fair_queue import make_request_queue
from engine.scheduler.kv_transfers import KVTransfers
from engine.scheduler.plan import StepPlan, is_decode
from engine.scheduler.prefill_budget import PrefillBudget, PrefillLimits, PrefillLoad, StepLimits
from engine.scheduler.request import Sequence, SequenceStatus
from engine.scheduler.running_queue import RunningQueue
from engine.scheduler.step_builder import StepBuilder

#: After so many steps with preemptions in which the first running sequence got no tokens, that
#: sequence is scheduled first.
MAX_STARVED_STEPS = 8


class Scheduler:
    """Plans steps; owns the waiting queue, the running sequences and the KV cache.

    The queue orders prompts (fcfs, priority, fair), `RunningQueue` chooses which sequences give up
    blocks or a seat, and `DecodeRotation` limits prompt tokens and keeps steps short.

    Attributes:
        drafts: adds drafts to steps.
        prompt_load: the prompts' part of the last scheduled step.
        num_steps: number of steps scheduled so far.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        token_budget: int,
        prefill_limits: PrefillLimits | None = None,
        layout: KVCacheConfig | None = None,
        max_model_len: int = 0,
        *,
        mixes: bool = True,
    ) -> None:
        """
        Args:
            config: settings; those that depend on the model are resolved.
            num_blocks: size of the KV pool.
            token_budget: max_num_batched_tokens.
            prefill_limits: limits of prompt tokens in a step with decodes; None: no limit.
            layout: the model's KV cache groups; None: full attention in all layers.
            max_model_len: the model's context length; 0: unbounded.
            mixes: whether prompts and decodes may be in the same step.
        """
        self.config = config
        self._mixes = mixes
        #: Whether the last step held only prompts: then decodes come first.
        self._ran_prompts = False
        self.max_num_seqs = config.max_num_seqs
        self.limits = StepLimits(
            token_budget,
            max_chunk_tokens=config.long_prefill_token_threshold or token_budget,
            chunked=config.enable_chunked_prefill,
            share=prefill_limits or PrefillLimits(token_budget),
        )
        self.kv = make_coordinator(
            layout, num_blocks, config.block_size, config.enable_prefix_caching
        )
        #: Length of the longest sequence that can ever run.
        self.capacity_tokens = self.kv.max_sequence_tokens(
            num_blocks, self.limits.max_tokens_per_sequence, max_model_len
        )
        if max_model_len:
            longest = self.kv.max_blocks_per_sequence(
                max_model_len, self.limits.max_tokens_per_sequence
            )
            self.kv.quotas.unreservable_blocks = min(num_blocks, longest)
        self.waiting = make_request_queue(config)
        # A step encodes as many vectors as it has tokens: no decode waits long for pictures.
        self.encoder_cache = EncoderCacheManager(
            encoder_capacity(token_budget, max_model_len), token_budget
        )
        self._runs = RunningQueue(config, self.kv, self.waiting, self.limits, self.encoder_cache)
        self.running = self._runs.sequences
        self._rotation = DecodeRotation(self.kv.quotas, self.waiting, self._runs, self.limits)
        self.drafts = DraftScheduler(self.kv, self.waiting, self._runs)
        self._max_model_len = max_model_len
        self.num_steps = 0
        self.prompt_load = PrefillLoad()
        #: The last plan.
        self._plan = StepPlan(0)
        #: (seq_id, token) appended to beams since the last step, which weren't sampled.
        self._appended: list[tuple[int, int]] = []
        #: The running sequence that needs steps to itself; see `Sequence.isolated`.
        self._isolated: Sequence | None = None
        self._ran_isolated = False
        #: Steps with preemptions since the first running sequence last got tokens.
        self._num_starved_steps = 0

    def max_concurrency(self, num_tokens: int) -> float:
        """Number of sequences of `num_tokens` tokens that fit into the pool at once."""
        return self.kv.pool.num_blocks / self.kv.max_blocks_per_sequence(
            num_tokens, self.limits.max_tokens_per_sequence
        )

    @property
    def kv_connector(self) -> KVConnectorBase | None:
        """Saves and loads KV blocks outside the KV cache; None: nothing does."""
        return self._runs.kv_connector

    @kv_connector.setter
    def kv_connector(self, connector: KVConnectorBase | None) -> None:
        self._runs.kv_connector = connector

    @property
    def kv_transfers(self) -> KVTransfers:
        """Blocks that the connector loads or sends while steps run."""
        return self._runs.kv_transfers

    @property
    def num_waiting(self) -> int:
        """Number of sequences that are queued, or wait for the blocks that the connector loads."""
        return len(self.waiting) + self.kv_transfers.num_loads

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions since the counts were reset."""
        return self._runs.num_preemptions

    def reset_counts(self) -> None:
        """Reset the counts of preemptions and prefix hits."""
        self._runs.num_preemptions = 0
        self.kv.reset_lookups()

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self.running or len(self.waiting) or self._runs.removed_ids)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        quota = self.record_tenant(sequence.request.message)
        if sequence.index == 0:
            self._record_queue_position(sequence, quota)
        quota.sequences += 1
        num_cached = self._runs.find_cached_prefix(sequence).num_tokens
        self.waiting.push(sequence, num_cached)

    def cached_prefix(self, sequence: Sequence) -> tuple[int, bool]:
        """Number of a new sequence's first tokens that are in the KV cache, and whether the encoder
        must run because the states that they attend to aren't cached.
        """
        prefix = self._runs.find_cached_prefix(sequence)
        return prefix.num_tokens, self.kv.needs_encoding(prefix)

    def _record_queue_position(self, sequence: Sequence, quota: TenantQuota) -> None:
        """Record in the timeline how many sequences are ahead of a new one, and the ids of the
        tenant's own requests among them.
        """
        flight = sequence.timeline
        flight.num_ahead = len(self.running) + len(self.waiting)
        flight.num_ahead_own = quota.sequences
        if not quota.sequences:
            return
        requests = [other.request for other in self.running]
        if (head := self.waiting.peek_tenant(quota.name)) is not None:
            requests.append(head.request)
        ids = dict.fromkeys(
            request.request_id for request in requests if request.message.tenant == quota.name
        )
        flight.behind = list(ids)[: min(quota.sequences, MAX_NAMED)]

    def record_tenant(self, message: EngineRequest) -> TenantQuota:
        """Apply a request's settings for its tenant's share of the pool."""
        return self.kv.record_request(
            message.tenant,
            message.weight,
            message.kv_reserved_fraction,
            message.kv_max_fraction,
        )

    def max_tokens_for(self, message: EngineRequest) -> int:
        """Length in tokens of the longest sequence that the request's tenant can currently run."""
        blocks = self.kv.quotas.limit(self.record_tenant(message))
        return self.kv.max_sequence_tokens(
            blocks, self.limits.max_tokens_per_sequence, self._max_model_len
        )

    def schedule(self) -> tuple[StepPlan, list[Sequence]]:
        """Plan one step. Returns the plan and its sequences in the plan's order.

        Their `num_computed_tokens` already include the step.
        """
        self.num_steps += 1
        self.encoder_cache.start_step()
        self.kv.start_step()
        self._runs.preempt_for_reserves()
        prefill_budget, short_step = self._rotation.plan_prefill()
        step = StepBuilder(self.num_steps, self.limits.token_budget, prefill_budget)
        if self._schedule_isolated(step):
            return self._finish_plan(step)

        skipped: list[Sequence] = []
        if short_step is not None:
            step.split_prompt_budget(
                short_step.heavy_tenants, short_step.heavy_tenant_prompt_tokens
            )
            skipped = [
                sequence
                for sequence in self._rotation.skipped(short_step)
                # The last token of a prompt is scheduled with the prompts.
                if self._mixes or sequence.num_computed_tokens >= sequence.num_prompt_tokens
            ]
        self._runs.sort()

        # 1. Decodes, 2. prompts. A step that can't mix them alternates between the two.
        prompts_first = not self._mixes and not self._ran_prompts
        partial_prefills = self._schedule_decodes(step, set(skipped), prompts_only=prompts_first)
        self._ran_prompts = False
        if self._mixes or not step.scheduled:
            self._schedule_prompts(step, partial_prefills)
            self._ran_prompts = bool(step.scheduled)
        if prompts_first and not step.scheduled:
            self._schedule_decodes(step, set(skipped))
        if step.preempted or self._num_starved_steps:
            if not self.running or step.num_scheduled_tokens(self.running[0]):
                self._num_starved_steps = 0
            elif step.preempted:
                self._num_starved_steps += 1

        # 3. Tokens that a heavy tenant's prompts couldn't use go to its skipped rows, without
        # preempting others.
        if short_step is not None:
            self._rotation.record_prompts(short_step, step.prefill.remaining)
            may_decode = self._mixes or not self._ran_prompts
            for sequence in skipped[: step.num_unused_tenant_tokens]:
                if (
                    may_decode
                    and step.budget > 0
                    and sequence.status is SequenceStatus.RUNNING
                    and sequence is not self._isolated_running()
                    and not (sequence.num_placeholders and self._waits_for_token(sequence))
                    and sequence not in step  # preempted and started again
                    and self._runs.can_allocate(sequence, 1)
                ):
                    self._allocate(step, sequence, 1)
                    self._rotation.record_decode(sequence)
            # Drafts make a step longer, too.
            step.limit_budget(short_step.target_tokens)
        return self._finish_plan(step)

    def _schedule_decodes(
        self, step: StepBuilder, skipped: set[Sequence], *, prompts_only: bool = False
    ) -> list[Sequence]:
        """Schedule running sequences with one token to compute, unless the step is for prompts
        only; returns those whose prompts are partially computed.
        """
        isolated = self._isolated_running()
        block_size = self.config.block_size
        block_edges = (0, block_size - 1)
        partial_prefills: list[Sequence] = []
        # Each stage of a pipeline works on its own batch.
        max_decodes = -(-len(self.running) // self.config.pipeline_parallel_size)
        for sequence in self.running.copy():  # preemption changes the list
            if step.budget <= 0:
                break
            if len(step.scheduled) >= max_decodes:
                break
            if (
                sequence.status is not SequenceStatus.RUNNING
                or sequence is isolated
                or sequence in skipped
                or (sequence.num_placeholders and self._waits_for_token(sequence))
            ):
                continue
            num_computed = sequence.num_computed_tokens
            num_pending = len(sequence.token_ids) + sequence.num_placeholders - num_computed
            if num_pending > 1:
                partial_prefills.append(sequence)
            elif num_pending == 1:
                has_output = num_computed >= sequence.num_prompt_tokens
                if not has_output and (sequence.request.media or not self._mixes):
                    # A prompt's last token may be a picture's placeholder: then it is no decode.
                    partial_prefills.append(sequence)
                elif prompts_only:
                    continue
                elif has_output and num_computed % block_size not in block_edges:
                    step.add_decode(sequence)  # common case: needs no block and fills none
                else:
                    self._allocate(step, sequence, 1)
        return partial_prefills

    def _waits_for_token(self, sequence: Sequence) -> bool:
        """Whether a sequence can't be scheduled until the step in flight returns its token."""
        return self.config.pipeline_parallel_size > 1 or sequence.ends_in_flight

    def _schedule_prompts(self, step: StepBuilder, partial_prefills: list[Sequence]) -> None:
        """Schedule started and waiting prompts in the policy's order while budget, seats and blocks
        last.
        """
        starved = self._num_starved_steps >= MAX_STARVED_STEPS
        if starved and partial_prefills and partial_prefills[0] is self.running[0]:
            # Once it finishes, the others stop preempting each other.
            self._continue_prompt(step, partial_prefills.pop(0))
        while step.budget > 0:
            head = self._next_start(step)
            if partial_prefills:
                index = self.waiting.next_partial_prefill(partial_prefills)
                if head is None or not self.waiting.precedes(head, partial_prefills[index]):
                    self._continue_prompt(step, partial_prefills.pop(index))
                    continue
            if head is None:
                break
            self._start_head(step, head)
        self.waiting.clear_skipped()

    def _finish_plan(self, step: StepBuilder) -> tuple[StepPlan, list[Sequence]]:
        """Add the changes since the last step, drafts, and the KV connector's metadata."""
        plan = self._plan = step.plan
        self.prompt_load = step.prefill.load
        plan.removed = self._runs.pop_removed()
        if step.scheduled:
            plan.dropped_encodings = self.encoder_cache.pop_dropped()
        plan.appended, self._appended = self._appended, []
        if self.drafts.source is not None:
            self.drafts.add(step, self.drafts.source)
        if self.kv.states is not None:
            plan.block_copies = self.kv.states.pop_copies()
            plan.checkpoints = self.kv.states.pop_checkpoints()
        if self._runs.kv_connector is not None:
            metadata = self._runs.kv_connector.build_connector_meta(plan, step.scheduled)
            plan.kv_meta = b"" if metadata is None else msgspec.msgpack.encode(metadata)
        return plan, step.scheduled

    def plan_removals(self) -> StepPlan:
        """A plan without sequences: the removals since the last step, and what the KV connector
        saves of them.
        """
        self.num_steps += 1
        plan, _ = self._finish_plan(StepBuilder(self.num_steps, 0, PrefillBudget(0)))
        return plan

    def _allocate(self, step: StepBuilder, sequence: Sequence, num_tokens: int) -> None:
        """Schedule a running sequence's next tokens. If blocks are short, other sequences are
        preempted, and the sequence itself if no other can be.
        """
        quota, num_computed = self._runs.quota_of(sequence), sequence.num_computed_tokens
        while (blocks := self.kv.allocate_slots(sequence, quota, num_computed, num_tokens)) is None:
            victim = self._runs.victim_for_growth(step, sequence, num_tokens)
            if victim is sequence and self._runs.reject_oversized(
                sequence, num_computed, num_tokens
            ):
                return
            self._runs.preempt_in_step(step, victim)
            if victim is sequence:
                return
        step.add_blocks(sequence, blocks)
        self._encode(step, sequence, num_tokens)
        step.add(sequence, num_tokens)
        if not is_decode(num_tokens):
            self.waiting.charge_prompt(sequence, num_tokens)

    def _encode(self, step: StepBuilder, sequence: Sequence, num_tokens: int) -> None:
        """Schedule the encoding of the pictures that a sequence's next tokens stand for."""
        if media := sequence.request.media:
            previous = self.encoder_cache.num_step_vectors
            step.plan.encode += self.encoder_cache.schedule(
                sequence.seq_id, media, sequence.num_computed_tokens, num_tokens
            )
            count = self.encoder_cache.num_step_vectors - previous
            step.budget_of(sequence).consume_vectors(count)

    def _limit_by_media(
        self, step: StepBuilder, sequence: Sequence, num_computed: int, chunk: int
    ) -> int:
        """Number of a chunk's tokens whose pictures this step can encode."""
        media = sequence.request.media
        num_vectors = step.budget_of(sequence).num_vectors if self.limits.chunked else None
        return self.encoder_cache.limit_tokens(media, num_computed, chunk, num_vectors)

    def _continue_prompt(self, step: StepBuilder, sequence: Sequence) -> None:
        """Schedule the next chunk of a started prompt, unless it was preempted.

        A prompt that was preempted and restarted in this step is scheduled already.
        """
        if sequence.status is not SequenceStatus.RUNNING or sequence in step:
            return
        num_computed = sequence.num_computed_tokens
        num_pending = sequence.num_tokens + sequence.num_placeholders - num_computed
        chunk = step.prompt_chunk(self.limits, sequence, num_pending, num_computed)
        if sequence.request.media:
            chunk = self._limit_by_media(step, sequence, num_computed, chunk)
        if chunk:
            self._allocate(step, sequence, chunk)

    def _next_start(self, step: StepBuilder) -> Sequence | None:
        """The next waiting sequence, with a seat claimed for it; None when no more may start.

        Nothing starts after a preemption: it would take the blocks that were just freed for
        sequences that have waited longer. The exception is a tenant within its share of which no
        sequence was preempted.
        """
        waiting = self.waiting
        while (
            not step.admission_closed and (head := waiting.peek()) is not None and not head.isolated
        ):
            quota = self._runs.quota_of(head)
            if step.preempted and not (
                waiting.fair
                and quota.name not in step.preempted
                and self.kv.quotas.usage_ratio(quota, quota.used) < 1
            ):
                return None
            if step.tenant_budgets and not step.prompt_budget(head, 0):
                waiting.skip_tenant(quota.name)
                continue
            if not self._runs.is_full or self._runs.preempt_for_seat(step, head, quota):
                return head
            if waiting.num_tenants == 1:
                return None
            waiting.skip_tenant(quota.name)
        return None

    def _start_head(self, step: StepBuilder, head: Sequence) -> None:
        """Start the queue's head; if it can't start, skip its tenant or close admission.

        No sequence overtakes one that can't start, except:

        - a tenant at its own maximum of blocks is skipped, one that takes more than its share of
          seats when few are left, unless its request is urgent, and one whose head waits for the
          KV connector;
        - when the pool is full, a tenant gets the blocks reserved for it, and up to its share
          those of tenants that exceed theirs.
        """
        quota = self._runs.quota_of(head)
        if head.request.priority >= 0 and self._runs.must_leave_seats(quota):
            self.waiting.skip_tenant(quota.name)
            return
        if self._start(step, head) or head.finished or self.waiting.is_skipped(quota.name):
            return
        num_missing = step.num_missing_blocks
        if num_missing and quota.used + num_missing > quota.maximum:
            self.waiting.skip_tenant(quota.name)
            return
        step.admission_closed = True
        if not num_missing:
            return
        if self.waiting.fair and self._runs.preempt_for_share(step, head, quota):
            self._start(step, head)
            return
        for reserving in list(self.kv.quotas.tenants_with_reserve):
            reserved = self.waiting.peek_tenant(reserving.name)
            has_budget = step.budget > 0 and not self._runs.is_full
            if reserved is not None and not reserved.isolated and has_budget:
                self._start(step, reserved)

    def _start(self, step: StepBuilder, sequence: Sequence) -> bool:
        """Start the head of a tenant's queue with its first chunk. Returns whether it started.

        Sets `step.num_missing_blocks` if blocks are short.
        """
        step.num_missing_blocks = 0
        if sequence.num_placeholders:
            # Preempted while a step samples its next token: wait for that token.
            return False
        kv, quota = self.kv, self._runs.quota_of(sequence)
        prefix = self._runs.find_cached_prefix(sequence)
        num_external, is_async = self._num_external_tokens(sequence, prefix.num_tokens)
        if num_external is None or (is_async and self.kv_transfers.num_loads >= self.max_num_seqs):
            self.waiting.skip_tenant(quota.name)
            return False
        if is_async:
            return self._start_load(step, sequence, prefix, num_external)
        num_computed = prefix.num_tokens + num_external
        num_pending = sequence.num_tokens - num_computed
        chunk = step.prompt_chunk(self.limits, sequence, num_pending, num_computed)
        if sequence.request.media:
            chunk = self._limit_by_media(step, sequence, num_computed, chunk)
        if chunk == 0 or (chunk < num_pending and not self.limits.chunked):
            return False
        encodes = kv.needs_encoding(prefix)
        if encodes and not self.encoder_cache.fits_step(prefix.num_states):
            return False
        blocks = kv.allocate_slots(sequence, quota, num_computed, chunk, prefix)
        if blocks is None:
            self._record_missing_blocks(step, sequence, num_computed, chunk, prefix)
            return False
        self.waiting.pop(sequence)
        if sequence.status is SequenceStatus.WAITING:
            if not num_computed:
                sequence.timeline.cold_reason = kv.miss_reason(
                    sequence, prefix, reads_cache=sequence.reads_cache
                )
            sequence.first_scheduled_at = time.time()
            sequence.num_cached_tokens = min(num_computed, sequence.num_prompt_tokens)
            sequence.timeline.num_cached_tokens = sequence.num_cached_tokens
            sequence.num_prompt_counted = sequence.num_cached_tokens
            kv.record_lookup(sequence.num_tokens, prefix.num_tokens)
        sequence.num_computed_tokens = num_computed
        sequence.num_external_tokens = num_external
        sequence.kv_awaited = False
        self._runs.add(sequence)
        step.start(sequence, kv.get_block_tables(sequence.seq_id))
        if encodes and not self._loads_encoder_states(sequence, step.plan.new[-1].block_ids):
            self.encoder_cache.charge_step(prefix.num_states)
            step.encode_states(sequence, kv.get_state_blocks(sequence.seq_id))
        if self._runs.kv_connector is not None:
            self._runs.kv_connector.update_state_after_alloc(
                sequence, step.plan.new[-1].block_ids, num_external
            )
        self._encode(step, sequence, chunk)
        step.add(sequence, chunk)
        self.waiting.charge_prompt(sequence, chunk)
        return True

    def _record_missing_blocks(
        self,
        step: StepBuilder,
        sequence: Sequence,
        num_computed: int,
        num_new: int,
        prefix: CachedPrefix,
    ) -> None:
        """A sequence can't start for want of blocks: count them, or end it if it never can."""
        if not self._runs.reject_oversized(sequence, num_computed, num_new, prefix):
            step.num_missing_blocks = self.kv.num_blocks_to_allocate(
                sequence.seq_id, num_computed, num_new, prefix
            )

    def _start_load(
        self, step: StepBuilder, sequence: Sequence, prefix: CachedPrefix, num_external: int
    ) -> bool:
        """Have the KV connector load tokens after the cached prefix of the head of a tenant's
        queue, while steps run. Returns whether it begins. See `_start`.
        """
        connector = self._runs.kv_connector
        if connector is None:
            return False
        quota, num_cached = self._runs.quota_of(sequence), prefix.num_tokens
        # Like drafts, they aren't cached before they are known to be right.
        blocks = self.kv.allocate_slots(
            sequence, quota, num_cached, num_external, prefix, lookahead=True
        )
        if blocks is None:
            self._record_missing_blocks(step, sequence, num_cached, num_external, prefix)
            return False
        self.waiting.pop(sequence)
        sequence.num_computed_tokens = num_cached + num_external
        block_ids = self._runs.block_ids(sequence)
        connector.update_state_after_alloc(sequence, block_ids, num_external)
        self.kv_transfers.begin_load(sequence, self.num_steps)
        return True

    def _num_external_tokens(
        self, sequence: Sequence, num_computed: int
    ) -> tuple[int | None, bool]:
        """Number of tokens after a waiting sequence's cached prefix that the KV connector loads,
        and whether while steps run; None: not known yet.
        """
        if sequence.kv_awaited or (connector := self._loading_connector(sequence)) is None:
            return 0, False
        num_tokens, is_async = connector.get_num_new_matched_tokens(sequence, num_computed)
        if not (num_tokens and is_async):
            return num_tokens, False
        if not self.kv.enable_caching or sequence.request.is_beam_search:
            return 0, False  # a beam's tokens may be replaced meanwhile
        if sequence.request_id in self.kv_transfers:
            return 0, False  # its blocks came too late once, and haven't come yet
        return num_tokens, True

    def _loads_encoder_states(self, sequence: Sequence, block_ids: list[list[int]]) -> bool:
        """Whether the KV connector loads the states that a starting sequence attends to."""
        connector = self._loading_connector(sequence)
        return connector is not None and connector.load_encoder_states(sequence, block_ids)

    def _loading_connector(self, sequence: Sequence) -> KVConnectorBase | None:
        """The connector that loads blocks for a starting sequence; None: they are computed."""
        # Loading isn't tried again after it has made a step fail.
        if sequence.isolated or not sequence.reads_cache:
            return None
        return self._runs.kv_connector

    @property
    def has_isolated_step(self) -> bool:
        """Whether a sequence that must run in steps of its own is running, or is next."""
        head = self.waiting.peek()
        return self._isolated_running() is not None or (head is not None and head.isolated)

    def _isolated_running(self) -> Sequence | None:
        """The running sequence that needs steps to itself and hasn't got a token yet."""
        sequence = self._isolated
        if sequence is not None and not (
            sequence.isolated and sequence.status is SequenceStatus.RUNNING
        ):
            sequence = self._isolated = None
        return sequence

    def _schedule_isolated(self, step: StepBuilder) -> bool:
        """Schedule the isolated sequence alone. Returns whether the step is taken by it.

        The other sequences get every second step, so that many isolated prompts can't starve them.
        """
        sequence = self._isolated_running()
        must_alternate = len(self.running) > (sequence is not None)
        shared_budget, step.prefill = step.prefill, PrefillBudget(step.budget)
        if self._ran_isolated and must_alternate:
            self._ran_isolated = False
        elif sequence is not None:
            self._continue_prompt(step, sequence)
            self._ran_isolated = True
        else:
            head = self.waiting.peek()
            self._ran_isolated = (
                head is not None
                and head.isolated
                and not self._runs.is_full
                and self._start(step, head)
            )
            if self._ran_isolated:
                self._isolated = head
        if not self._ran_isolated:
            step.prefill = shared_budget  # others may decode in it
        return self._ran_isolated

    def add_parked_beam(self, sequence: Sequence) -> None:
        """Register a beam's sequence that starts later, by `requeue`."""
        self.record_tenant(sequence.request.message).sequences += 1
        sequence.status = SequenceStatus.PARKED_BEAM

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """Append a token that wasn't sampled to a sequence."""
        sequence.token_ids.append(token_id)
        if sequence.status is SequenceStatus.RUNNING:
            self._appended.append((sequence.seq_id, token_id))
        else:
            self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Queue a sequence whose tokens were replaced ahead of those that never ran."""
        if sequence.status is SequenceStatus.RUNNING:
            self._runs.free_and_remove(sequence)
        if sequence.status is not SequenceStatus.PREEMPTED:
            sequence.status = SequenceStatus.PREEMPTED
            self.waiting.prepend(sequence)

    def park_beam(self, sequence: Sequence) -> None:
        """Free a beam's blocks, if it runs, and leave it out until it is requeued.

        A waiting one stays queued; it can be parked once it runs.
        """
        if sequence.status is SequenceStatus.RUNNING:
            self._runs.free_and_remove(sequence)
            sequence.status = SequenceStatus.PARKED_BEAM

    def park_idle_beam(self) -> bool:
        """When nothing could be scheduled, park a beam that waits for others. Returns whether one
        was parked.
        """
        for sequence in reversed(self.running):
            idle = sequence.num_computed_tokens == len(sequence.token_ids)
            if idle and sequence.request.is_beam_search:
                self.park_beam(sequence)
                return True
        return False

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | None = None) -> None:
        """See `RunningQueue.finish`."""
        self._runs.finish(sequence, reason, stop_reason)

    def pop_rejected(self) -> list[tuple[Sequence, KVPoolTooSmall]]:
        """Sequences that ended because they exceed their tenant's current limit, with the error."""
        return self._runs.pop_rejected()

    def preempt(self, sequence: Sequence) -> None:
        """Free a running sequence's blocks and queue it again; its tokens are recomputed later."""
        self._runs.preempt(sequence)

    def preempt_all(self) -> None:
        """Preempt all running sequences, keeping their order in the queue."""
        for sequence in reversed(self.running.copy()):
            self._runs.preempt(sequence)

    def roll_back(self, *steps: tuple[StepPlan, list[Sequence]]) -> None:
        """Roll back a failed step and those planned after it: nothing that they computed counts or
        stays cached.

        All of their sequences go back to the queue and each run in a step of their own, so that
        only the sequence that causes the failure fails.
        """
        counts: dict[Sequence, int] = {}
        for plan, scheduled in steps:
            self.encoder_cache.forget(plan.encode)
            started = {new.seq_id for new in plan.new}
            for sequence, count in zip(scheduled, plan.num_scheduled, strict=True):
                num_loaded = sequence.num_external_tokens if sequence.seq_id in started else 0
                if sequence.seq_id in started and sequence.encoder_key:
                    self.kv.uncache_states(sequence)  # they may have been loaded
                counts[sequence] = counts.get(sequence, 0) + count + num_loaded
        for sequence, count in reversed(counts.items()):
            sequence.num_placeholders = 0
            if sequence.status is SequenceStatus.RUNNING:
                sequence.num_computed_tokens -= count
                self._runs.uncache_from(sequence, sequence.num_computed_tokens)
                sequence.isolated = True
                self._runs.preempt(sequence, saves=False)
            else:
                # It finished while its step ran: its blocks may belong to another sequence now.
                self.kv.uncache_all(sequence.block_hashes)
        if self._runs.kv_connector is not None:
            self.kv_transfers.drop_unstarted(self._runs.kv_connector)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the pool's accounting is consistent, only running sequences
        and the KV connector's transfers hold blocks, and the last plan lists no sequence twice.
        """
        seq_ids = self._plan.seq_ids
        if len(set(seq_ids)) != len(seq_ids):
            raise RuntimeError(f"A sequence stands twice in step {self._plan.step}: {seq_ids}.")
        self.encoder_cache.check_integrity()
        self.kv.check_integrity(
            self.kv_transfers.tenants
            | {sequence.seq_id: sequence.request.message.tenant for sequence in self.running}
        )
