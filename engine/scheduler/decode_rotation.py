"""Short steps for other tenants while one tenant holds most of the machine.

A step lasts as long as all of its work takes, and a new request waits for its end. A tenant with
hundreds of sequences in every step makes that wait longer than another tenant's whole request. So
while other tenants are active, the heavy tenant's rows and prompts are spread over several steps:
rows take turns, and those that a step skips come first in the next one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from engine.kv_cache import TenantQuota
from engine.kv_cache.tenant_quotas import TenantQuotas
from engine.scheduler.plan import is_decode
from engine.scheduler.prefill_budget import MIN_START_TOKENS, PrefillBudget, StepLimits
from engine.scheduler.request import Sequence
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.running_queue import RunningQueue

#: Maximum recorded lead of light tenants over heavy ones, in full steps of tokens.
_MAX_CREDIT_STEPS = 8
#: The largest fraction of a step that heavy tenants get by their weights.
_MAX_HEAVY_FRACTION = 0.99


@dataclass(frozen=True, slots=True)
class StepDemand:
    """The work that running sequences have for a step.

    Attributes:
        rows: number of sequences that decode.
        pending: remaining tokens of prompts that have started.
    """

    rows: int
    pending: int

    @classmethod
    def from_running(cls, running: Iterable[Sequence]) -> StepDemand:
        rows, pending = 0, 0
        for sequence in running:
            remaining = len(sequence.token_ids) + sequence.num_placeholders
            remaining -= sequence.num_computed_tokens
            if is_decode(remaining):
                rows += 1
            else:
                pending += remaining
        return cls(rows, pending)


@dataclass(frozen=True, slots=True)
class ShortStep:
    """The limits of a step that is kept short.

    Attributes:
        target_tokens: tokens that it should hold.
        heavy_tenants: tenants that hold more than their share.
        decode_fraction: fraction of their rows that it holds.
        heavy_tenant_prompt_tokens: tokens of the heavy tenants' prompts.
        light_tenant_prompt_tokens: tokens of the other tenants' prompts.
    """

    target_tokens: int
    heavy_tenants: list[TenantQuota]
    decode_fraction: float
    heavy_tenant_prompt_tokens: int
    light_tenant_prompt_tokens: int


class DecodeRotation:
    """Limits a step's prompt tokens, and rotates the rows of heavy tenants."""

    def __init__(
        self, quotas: TenantQuotas, waiting: RequestQueue, runs: RunningQueue, limits: StepLimits
    ) -> None:
        self._quotas, self._waiting, self._runs, self._limits = quotas, waiting, runs, limits
        #: The last heavy tenants; one without running sequences may still be heavy.
        self._heavy: list[TenantQuota] = []
        #: Tenant -> id of its last row that was scheduled.
        self._last_seq_id: dict[str, int] = {}
        #: Tokens beyond their share that light tenants have had in short steps.
        self._light_tenant_credit = 0.0
        #: Whether prompts of light tenants used nothing of what the last step reserved for them.
        self._light_tenants_blocked = False

    def plan_prefill(self) -> tuple[PrefillBudget, ShortStep | None]:
        """Plan the next step's prompt tokens, and its limits if it is to be short.

        Prompts may use the whole token budget unless a sequence decodes in the step.
        """
        share, max_tokens = self._limits.share, self._limits.token_budget
        if not share.saturation_decodes and share.max_prompt_tokens >= max_tokens:
            return PrefillBudget(max_tokens), None  # no limit: nothing to count
        demand = StepDemand.from_running(self._runs.sequences)
        num_tokens = max_tokens
        if demand.rows:
            num_waiting = demand.pending + self._waiting.num_tokens
            num_tokens = min(share.prompt_tokens(demand.rows, num_waiting), max_tokens)
        short_step = self._plan_short_step(demand, num_tokens)
        if short_step is not None:
            # The target is measured in steps that include all reads of context.
            min_tokens = num_tokens = short_step.light_tenant_prompt_tokens
        elif demand.rows:
            min_tokens = min(share.min_prompt_tokens(demand.rows), max_tokens)
        else:
            return PrefillBudget(max_tokens), None
        budget = PrefillBudget(
            num_tokens,
            min_tokens,
            MIN_START_TOKENS,
            share.context_cost_tokens,
            share.vector_cost_tokens,
        )
        return budget, short_step

    def _plan_short_step(self, demand: StepDemand, max_prompt_tokens: int) -> ShortStep | None:
        """Limits of a short step; None if only one tenant is active, or none is heavy.

        Args:
            demand: of all running sequences.
            max_prompt_tokens: prompt tokens that the step could hold otherwise.
        """
        target_tokens, waiting = self._limits.share.target_step_tokens, self._waiting
        if not target_tokens or not waiting.fair:
            return None
        num_pending = demand.pending + waiting.num_tokens
        num_tokens = demand.rows + min(max_prompt_tokens, num_pending)
        if num_tokens <= target_tokens or not self._find_heavy():
            return None
        names = {quota.name for quota in self._heavy}
        heavy = StepDemand.from_running(
            sequence
            for sequence in self._runs.sequences
            if sequence.request.message.tenant in names
        )
        heavy_pending = heavy.pending + sum(waiting.num_tenant_tokens(name) for name in names)
        heavy_prompt_tokens = min(
            max_prompt_tokens, heavy_pending, max(0, self._limits.token_budget - demand.rows)
        )
        light_tokens = min(num_pending - heavy_pending, max_prompt_tokens)
        heavy_tokens, light_tokens = self._split(
            target_tokens, demand.rows - heavy.rows, light_tokens
        )
        if heavy.rows + heavy_prompt_tokens <= heavy_tokens:
            return None
        fraction = heavy_tokens / (heavy.rows + heavy_prompt_tokens)
        heavy_prompt_tokens = math.ceil(heavy_prompt_tokens * fraction)
        return ShortStep(target_tokens, self._heavy, fraction, heavy_prompt_tokens, light_tokens)

    def _split(
        self, target_tokens: int, light_rows: int, light_prompt_tokens: int
    ) -> tuple[float, int]:
        """Split a step into tokens of heavy tenants, and tokens of light tenants' prompts.

        Heavy tenants get what light ones leave; while light ones have prompts, a quarter of their
        share, which makes the step even shorter, so that these prompts rarely need a second one.
        Once light tenants have been ahead for long, all get their shares. Heavy tenants always get
        as many tokens per row of light ones as the weights say.
        """
        fraction = sum(self._quotas.weight_fraction(quota) for quota in self._heavy)
        fraction = min(fraction, _MAX_HEAVY_FRACTION)
        heavy_per_light = fraction / (1 - fraction)
        share = fraction * target_tokens
        if not light_prompt_tokens or self._light_tenants_blocked:
            used_tokens, light_prompt_tokens = 0, min(light_prompt_tokens, target_tokens)
            heavy_tokens = max(share, target_tokens - light_rows)
        elif self._light_tenant_credit < _MAX_CREDIT_STEPS * target_tokens:
            heavy_tokens = share / 4
            light_prompt_tokens = min(light_prompt_tokens, int(target_tokens + heavy_tokens))
            used_tokens = light_prompt_tokens
        else:
            heavy_tokens = share
            light_prompt_tokens = min(light_prompt_tokens, math.ceil(target_tokens - share))
            used_tokens = light_prompt_tokens
        heavy_tokens = max(heavy_tokens, light_rows * heavy_per_light)
        self._light_tenant_credit = max(
            0.0,
            self._light_tenant_credit + light_rows + used_tokens - heavy_tokens / heavy_per_light,
        )
        return heavy_tokens, light_prompt_tokens

    def _find_heavy(self) -> bool:
        """Whether tenants use so much that others, active lately, get less than their share.

        A tenant is heavy if it has half as many sequences again as its share (running, or waiting
        if none runs), or leaves others less than half of theirs. If all tenants flood the engine,
        seats are assigned by weights: none is heavy, and steps stay long.
        """
        candidates = dict.fromkeys((*self._runs.tenants, *self._heavy))
        self._heavy = [quota for quota in candidates if self._is_heavy(quota)]
        if not self._heavy:
            return False
        has_light = any(quota not in self._heavy for quota in self._runs.tenants)
        return has_light or self._quotas.has_other_recent_tenants(self._heavy)

    def _is_heavy(self, quota: TenantQuota) -> bool:
        fraction = self._quotas.weight_fraction(quota)
        total, count = len(self._runs.sequences), quota.running
        if not total:
            total, count = len(self._waiting), quota.sequences
        return count > total * min(1.5 * fraction, (1 + fraction) / 2)

    def skipped(self, step: ShortStep) -> list[Sequence]:
        """Rows that a short step skips: those that waited longest are scheduled first.

        Urgent ones (`priority` below 0) are never skipped.
        """
        rows_by_tenant: dict[str, list[Sequence]] = {quota.name: [] for quota in step.heavy_tenants}
        for sequence in self._runs.sequences:
            rows = rows_by_tenant.get(sequence.request.message.tenant)
            if rows is None or sequence.request.priority < 0:
                continue
            num_tokens = len(sequence.token_ids) + sequence.num_placeholders
            if is_decode(num_tokens - sequence.num_computed_tokens):
                rows.append(sequence)
        skipped = [
            self._skip_rows(name, rows, math.ceil(len(rows) * step.decode_fraction))
            for name, rows in rows_by_tenant.items()
        ]
        self._last_seq_id = {
            name: self._last_seq_id[name] for name in rows_by_tenant if name in self._last_seq_id
        }
        return [row for rows in zip_longest(*skipped) for row in rows if row is not None]

    def _skip_rows(self, tenant: str, rows: list[Sequence], num_scheduled: int) -> list[Sequence]:
        """Choose `count` rows of a tenant, in turns by id; returns the rows that are skipped."""
        if num_scheduled >= len(rows):
            return []
        rows.sort(key=lambda sequence: sequence.seq_id)
        first = bisect_right(
            rows, self._last_seq_id.get(tenant, -1), key=lambda sequence: sequence.seq_id
        )
        rows = rows[first:] + rows[:first]
        self._last_seq_id[tenant] = rows[num_scheduled - 1].seq_id
        return rows[num_scheduled:]

    def record_prompts(self, step: ShortStep, num_unused: float) -> None:
        """Record the tokens that light tenants' prompts left unused: if none were used, those
        prompts wait for seats or blocks.
        """
        self._light_tenants_blocked = 0 < step.light_tenant_prompt_tokens <= num_unused

    def record_decode(self, sequence: Sequence) -> None:
        """Record that a row which the step had skipped is scheduled after all."""
        self._last_seq_id[sequence.request.message.tenant] = sequence.seq_id
