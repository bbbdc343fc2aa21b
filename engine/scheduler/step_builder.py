"""`StepBuilder`: a step while it is being planned."""

from __future__ import annotations

from dataclasses import replace

from engine.contract.messages import MAX_RECORDED_CHUNKS
from engine.kv_cache import Block, TenantQuota
from engine.scheduler.plan import EncodeTask, NewSequence, StepPlan, is_decode
from engine.scheduler.prefill_budget import PrefillBudget, StepLimits
from engine.scheduler.request import Sequence


class StepBuilder:
    """An unfinished plan, with its sequences in the plan's order.

    Attributes:
        budget: tokens that may still be scheduled.
        prefill: budget of the prompt tokens among them.
        tenant_budgets: separate prompt budgets of heavy tenants, in a step that is kept short.
        preempted: tenants of which a running sequence was preempted in this step.
        admission_closed: whether no more sequences may start in this step.
        num_missing_blocks: blocks that the last sequence lacked to start.
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
        """Whether the step holds a sequence; it never holds one twice."""
        return sequence in self.scheduled

    def split_prompt_budget(self, heavy_tenants: list[TenantQuota], num_tokens: int) -> None:
        """Give the prompts of heavy tenants a separate budget of `num_tokens`."""
        budget = replace(self.prefill, remaining=num_tokens, min_tokens=num_tokens)
        self.tenant_budgets = dict.fromkeys((quota.name for quota in heavy_tenants), budget)

    @property
    def num_unused_tenant_tokens(self) -> int:
        """Unused prompt tokens of heavy tenants."""
        budget = next(iter(self.tenant_budgets.values()))
        return max(0, int(budget.remaining))

    def limit_budget(self, num_tokens: int) -> None:
        """Reduce the budget so that the step has at most `num_tokens`."""
        self.budget = min(self.budget, max(0, num_tokens - self.plan.num_tokens))

    def prompt_budget(self, sequence: Sequence, context: int) -> int:
        """Tokens of a sequence's prompt, after `context` others, that still fit."""
        return self.budget_of(sequence).tokens(context)

    def budget_of(self, sequence: Sequence) -> PrefillBudget:
        """The budget of a sequence's prompt: a separate one if its tenant has one."""
        if not self.tenant_budgets:
            return self.prefill
        return self.tenant_budgets.get(sequence.request.message.tenant, self.prefill)

    def prompt_chunk(
        self, limits: StepLimits, sequence: Sequence, num_pending: int, num_computed: int
    ) -> int:
        """Number of a sequence's next `num_pending` prompt tokens that this step may compute.

        `num_computed`: tokens before them.
        """
        if not limits.chunked:
            return min(num_pending, self.budget)
        share = limits.share.chunk(num_pending, self.prompt_budget(sequence, num_computed))
        return min(num_pending, self.budget, limits.max_chunk_tokens, share)

    def add(self, sequence: Sequence, count: int) -> None:
        """Schedule `count` tokens of a sequence."""
        plan = self.plan
        plan.seq_ids.append(sequence.seq_id)
        plan.num_scheduled.append(count)
        self.scheduled.append(sequence)
        self.budget -= count
        starts = self.is_new(sequence)
        if starts or not is_decode(count):
            budget = self.budget_of(sequence)
            budget.consume(count, sequence.num_computed_tokens, starts=starts)
        sequence.num_computed_tokens += count
        sequence.timeline.num_steps += 1
        num_tokens = len(sequence.token_ids)
        if num_tokens == sequence.num_prompt_tokens and not sequence.num_placeholders:
            flight = sequence.timeline
            flight.prefill_chunks += 1
            if flight.prefill_chunks <= MAX_RECORDED_CHUNKS:
                flight.chunks.append((sequence.age_ms, count))
        caught_up = sequence.num_computed_tokens == num_tokens + sequence.num_placeholders
        plan.num_samples.append(int(caught_up))
        if sequence.counts_placeholders:
            sequence.num_placeholders += caught_up

    def add_decode(self, sequence: Sequence) -> None:
        """`add` for the common case: the last token of a sequence that has output."""
        plan = self.plan
        plan.seq_ids.append(sequence.seq_id)
        plan.num_scheduled.append(1)
        plan.num_samples.append(1)
        self.scheduled.append(sequence)
        self.budget -= 1
        sequence.num_computed_tokens += 1
        sequence.timeline.num_steps += 1
        if sequence.counts_placeholders:
            sequence.num_placeholders += 1

    def add_drafts(self, row: int, drafts: list[int]) -> None:
        """Schedule drafts after the last token of a row that decodes."""
        plan, sequence = self.plan, self.scheduled[row]
        plan.drafts[sequence.seq_id] = drafts
        plan.num_scheduled[row] += len(drafts)
        plan.num_samples[row] += len(drafts)
        sequence.num_computed_tokens += len(drafts)
        self.budget -= len(drafts)

    def remove(self, sequence: Sequence) -> int:
        """Undo `add`, `start` and `add_blocks` for a sequence; returns the number of its tokens."""
        if sequence not in self:
            return 0
        row = self.scheduled.index(sequence)
        starts, count = self.is_new(sequence), self.plan.num_scheduled[row]
        if starts or not is_decode(count):
            budget = self.budget_of(sequence)
            budget.refund(count, sequence.num_computed_tokens - count, starts=starts)
        del self.scheduled[row], self.plan.seq_ids[row], self.plan.num_samples[row]
        del self.plan.num_scheduled[row]
        self.plan.new = [new for new in self.plan.new if new.seq_id != sequence.seq_id]
        self._started.discard(sequence.seq_id)
        self.plan.new_blocks = [
            entry for entry in self.plan.new_blocks if entry[0] != sequence.seq_id
        ]
        num_tokens = len(sequence.token_ids)
        num_ahead = sequence.num_computed_tokens - num_tokens + 1
        if sequence.counts_placeholders and sequence.num_placeholders == num_ahead > 0:
            sequence.num_placeholders -= 1
        if num_tokens == sequence.num_prompt_tokens and not sequence.num_placeholders:
            sequence.timeline.prefill_chunks -= 1
            del sequence.timeline.chunks[sequence.timeline.prefill_chunks :]
        self.budget += count
        sequence.num_computed_tokens -= count
        if starts:
            sequence.num_computed_tokens -= sequence.num_external_tokens  # they won't be loaded
        sequence.timeline.num_steps -= 1
        return count

    def num_scheduled_tokens(self, sequence: Sequence) -> int:
        """Number of a sequence's tokens in the step."""
        if sequence not in self:
            return 0
        return self.plan.num_scheduled[self.scheduled.index(sequence)]

    def first_written_token(self, sequence: Sequence) -> int:
        """Index of the first of a scheduled sequence's tokens whose KV the step writes."""
        num_loaded = sequence.num_external_tokens if self.is_new(sequence) else 0
        return sequence.num_computed_tokens - self.num_scheduled_tokens(sequence) - num_loaded

    def is_new(self, sequence: Sequence) -> bool:
        """Whether a sequence starts in this step, so that the worker doesn't have it yet."""
        return sequence.seq_id in self._started

    def start(self, sequence: Sequence, tables: list[list[Block]]) -> None:
        """Describe a sequence that the worker doesn't have."""
        request = sequence.request
        message = request.message
        prompt_logprobs = sequence.prompt_logprobs
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
                prompt_logprobs_from=-1 if prompt_logprobs is None else len(prompt_logprobs),
                adapter=message.adapter_digest,
                encoder_inputs=request.encoder_inputs
                + [encoder_input for entry in request.media for encoder_input in entry.inputs],
                num_encoder_states=sequence.num_encoder_states,
                logits_processors=request.logits_processors,
                pooling=message.pooling,
            )
        )

    def encode_states(self, sequence: Sequence, block_ids: list[int]) -> None:
        """Schedule the encoding of a sequence's encoder input into its blocks."""
        if (entry := sequence.request.encoder_input) is None:
            raise RuntimeError(f"Sequence {sequence.seq_id} has nothing for the encoder.")
        self.plan.encode.append(
            EncodeTask(
                entry.key,
                entry.item.kind,
                entry.handle,
                sequence.seq_id,
                block_ids,
                adapter=entry.adapter,
            )
        )

    def cancel_encoding(self, sequence: Sequence) -> None:
        """Undo `encode_states`."""
        self.plan.encode = [task for task in self.plan.encode if task.seq_id != sequence.seq_id]

    def add_blocks(self, sequence: Sequence, blocks: list[list[Block]]) -> None:
        """Append new blocks, by KV cache group, to the tables of a sequence that the worker has."""
        if blocks:
            self.plan.new_blocks.append((sequence.seq_id, _ids(blocks)))


def _ids(tables: list[list[Block]]) -> list[list[int]]:
    return [[block.block_id for block in table] for table in tables]
