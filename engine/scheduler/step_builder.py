"""A step while it's being dealt, and what the worker is told of it."""

from __future__ import annotations

from dataclasses import replace

from engine.contract.lora import digest_of
from engine.contract.messages import MAX_RECORDED_CHUNKS
from engine.kv_cache import Block, TenantQuota
from engine.scheduler.plan import NewSequence, StepPlan, is_decode
from engine.scheduler.prefill_budget import PrefillBudget, StepLimits
from engine.scheduler.request import Sequence


class StepBuilder:
    """A plan in the making, with its sequences in the plan's order.

    Attributes:
        budget: tokens that may still be dealt.
        prefill: prompt tokens among them.
        tenant_budgets: tenants that have a part of their own instead, in a step that is held short.
        preempted: tenants of whose running sequences one was preempted in this step.
        admission_closed: whether no more sequences may start in this step.
        num_missing_blocks: blocks needed by the last sequence that was too short of them to start.
    """

    def __init__(self, step: int, budget: int, prefill: PrefillBudget) -> None:
        self.plan = StepPlan(step)
        self.scheduled: list[Sequence] = []
        self.budget = budget
        self.prefill = prefill
        self.tenant_budgets: dict[str, PrefillBudget] = {}
        self.preempted: set[str] = set()
        self.admission_closed = False
        self.num_missing_blocks = 0
        self._started: set[int] = set()

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether the step holds a sequence. It does so once: nobody is dealt to twice."""
        return sequence in self.scheduled

    def split_prompt_budget(self, heavy_tenants: list[TenantQuota], num_tokens: int) -> None:
        """Give the prompts of heavy tenants a budget of their own, of so many tokens."""
        budget = replace(self.prefill, remaining=num_tokens, min_tokens=num_tokens)
        self.tenant_budgets = dict.fromkeys((quota.name for quota in heavy_tenants), budget)

    @property
    def num_unused_tenant_tokens(self) -> int:
        """Tokens that the prompts of heavy tenants have left."""
        budget = next(iter(self.tenant_budgets.values()))
        return max(0, int(budget.remaining))

    def limit_budget(self, num_tokens: int) -> None:
        """Leave as much budget as makes a step of `num_tokens`, at most."""
        self.budget = min(self.budget, max(0, num_tokens - self.plan.num_tokens))

    def prompt_budget(self, sequence: Sequence, context: int) -> int:
        """Tokens of a sequence's prompt, behind so many others, that there's room for."""
        return self._room(sequence).tokens(context)

    def _room(self, sequence: Sequence) -> PrefillBudget:
        if not self.tenant_budgets:
            return self.prefill
        return self.tenant_budgets.get(sequence.request.message.tenant, self.prefill)

    def prompt_chunk(
        self, limits: StepLimits, sequence: Sequence, num_pending: int, num_computed: int
    ) -> int:
        """How many of a sequence's next `num_pending` prompt tokens this step may compute.

        `num_computed`: tokens before them.
        """
        if not limits.chunked:
            return min(num_pending, self.budget)
        share = limits.share.chunk(num_pending, self.prompt_budget(sequence, num_computed))
        return min(num_pending, self.budget, limits.max_chunk_tokens, share)

    def add(self, sequence: Sequence, count: int) -> None:
        """Put `count` tokens of a sequence into the step."""
        plan = self.plan
        plan.seq_ids.append(sequence.seq_id)
        plan.num_scheduled.append(count)
        self.scheduled.append(sequence)
        self.budget -= count
        starts = self.is_new(sequence)
        if starts or not is_decode(count):
            room = self._room(sequence)
            room.consume(count, sequence.num_computed_tokens, starts=starts)
        sequence.num_computed_tokens += count
        sequence.timeline.num_steps += 1
        known = len(sequence.token_ids)
        if known == sequence.num_prompt_tokens and not sequence.num_placeholders:
            flight = sequence.timeline
            flight.prefill_chunks += 1
            if flight.prefill_chunks <= MAX_RECORDED_CHUNKS:
                flight.chunks.append((sequence.age_ms, count))
        caught_up = sequence.num_computed_tokens == known + sequence.num_placeholders
        plan.num_samples.append(int(caught_up))
        if sequence.allows_lookahead:
            sequence.num_placeholders += caught_up

    def add_decode(self, sequence: Sequence) -> None:
        """`add` for the usual row: the newest token of a sequence that has begun its output."""
        plan = self.plan
        plan.seq_ids.append(sequence.seq_id)
        plan.num_scheduled.append(1)
        plan.num_samples.append(1)
        self.scheduled.append(sequence)
        self.budget -= 1
        sequence.num_computed_tokens += 1
        sequence.timeline.num_steps += 1
        if sequence.allows_lookahead:
            sequence.num_placeholders += 1

    def add_drafts(self, at: int, drafts: list[int]) -> None:
        """Let row `at`, which decodes, compute drafts behind its newest token."""
        plan, sequence = self.plan, self.scheduled[at]
        plan.drafts[sequence.seq_id] = drafts
        plan.num_scheduled[at] += len(drafts)
        plan.num_samples[at] += len(drafts)
        sequence.num_computed_tokens += len(drafts)
        self.budget -= len(drafts)

    def remove(self, sequence: Sequence) -> int:
        """Undo `add`, `start` and `add_blocks` for a sequence; the tokens that it had been
        dealt."""
        if sequence not in self:
            return 0
        at = self.scheduled.index(sequence)
        starts, count = self.is_new(sequence), self.plan.num_scheduled[at]
        if starts or not is_decode(count):
            room = self._room(sequence)
            room.refund(count, sequence.num_computed_tokens - count, starts=starts)
        del self.scheduled[at], self.plan.seq_ids[at], self.plan.num_samples[at]
        self.plan.new = [each for each in self.plan.new if each.seq_id != sequence.seq_id]
        self._started.discard(sequence.seq_id)
        del self.plan.num_scheduled[at]
        self.plan.new_blocks = [
            entry for entry in self.plan.new_blocks if entry[0] != sequence.seq_id
        ]
        known = len(sequence.token_ids)
        ahead = sequence.num_computed_tokens - known + 1
        if sequence.allows_lookahead and sequence.num_placeholders == ahead > 0:
            sequence.num_placeholders -= 1
        if known == sequence.num_prompt_tokens and not sequence.num_placeholders:
            sequence.timeline.prefill_chunks -= 1
            del sequence.timeline.chunks[sequence.timeline.prefill_chunks :]
        self.budget += count
        sequence.num_computed_tokens -= count
        sequence.timeline.num_steps -= 1
        return count

    def num_scheduled_tokens(self, sequence: Sequence) -> int:
        """Tokens of a sequence that the step computes, 0 if none."""
        if sequence not in self:
            return 0
        return self.plan.num_scheduled[self.scheduled.index(sequence)]

    def is_new(self, sequence: Sequence) -> bool:
        """Whether the worker doesn't know a sequence yet."""
        return sequence.seq_id in self._started

    def start(self, sequence: Sequence, tables: list[list[Block]]) -> None:
        """Describe a sequence that the worker doesn't hold, whole."""
        request = sequence.request
        message = request.message
        delivered = sequence.prompt_logprobs
        self._started.add(sequence.seq_id)
        self.plan.new.append(
            NewSequence(
                seq_id=sequence.seq_id,
                token_ids=list(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_computed_tokens=sequence.num_computed_tokens,
                block_ids=_ids(tables),
                sampling=request.sampling,
                seed=sequence.seed,
                prompt_logprobs_from=-1 if delivered is None else len(delivered),
                adapter=digest_of(message.adapter),
                encoder_inputs=request.encoder_inputs,
                logits_processors=request.logits_processors,
                pooling=message.pooling,
            )
        )

    def add_blocks(self, sequence: Sequence, blocks: list[list[Block]]) -> None:
        """Append new blocks, by KV cache group, to the tables of a sequence that the worker has."""
        if blocks:
            self.plan.new_blocks.append((sequence.seq_id, _ids(blocks)))


def _ids(tables: list[list[Block]]) -> list[list[int]]:
    """Block ids of tables."""
    return [[block.block_id for block in table] for table in tables]
