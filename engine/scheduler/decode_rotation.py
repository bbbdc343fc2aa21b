"""Short steps while others come and go beside a tenant that holds most of the machine.

A step lasts as long as all that it holds, and whoever comes while it runs waits for its end. Where
one tenant has hundreds of sequences, each of them in every step, that alone is longer than another
one's request takes. So while others are about, its rows and prompts are dealt as now, but spread
over several steps: rows take turns, and who sat out comes first in the next step.
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
from engine.scheduler.prefill_budget import LEAST_OF_A_START, PrefillBudget, StepLimits
from engine.scheduler.request import Sequence
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.running_queue import RunningQueue

#: Steps' worth of tokens that others may be ahead of those over their share.
_MOST_AHEAD = 8
#: Those over their share leave others so much at least, whatever the weights.
_MOST = 0.99


@dataclass(frozen=True, slots=True)
class StepDemand:
    """What sequences that run would have a step do.

    Attributes:
        rows: sequences that decode.
        pending: tokens of prompts that have begun.
    """

    rows: int
    pending: int

    @classmethod
    def from_running(cls, running: Iterable[Sequence]) -> StepDemand:
        """What these would have it do."""
        rows, pending = 0, 0
        for sequence in running:
            left = len(sequence.token_ids) + sequence.num_placeholders
            left -= sequence.num_computed_tokens
            if is_decode(left):
                rows += 1
            else:
                pending += left
        return cls(rows, pending)


@dataclass(frozen=True, slots=True)
class ShortStep:
    """A step that is held short.

    Attributes:
        target_tokens: tokens that it should hold.
        heavy_tenants: who is over his share.
        decode_fraction: what they get of all that they'd have in a step as long as it takes.
        heavy_tenant_prompt_tokens: tokens of their prompts.
        light_tenant_prompt_tokens: tokens of others' prompts.
    """

    target_tokens: int
    heavy_tenants: list[TenantQuota]
    decode_fraction: float
    heavy_tenant_prompt_tokens: int
    light_tenant_prompt_tokens: int


class DecodeRotation:
    """Who holds more than its share, and whose rows' turn it is."""

    def __init__(
        self, quotas: TenantQuotas, waiting: RequestQueue, runs: RunningQueue, limits: StepLimits
    ) -> None:
        self._quotas, self._waiting, self._runs, self._limits = quotas, waiting, runs, limits
        #: Who was over its share last; one that has nothing running just now may be still.
        self._over: list[TenantQuota] = []
        #: Tenant -> its row that was dealt last.
        self._last: dict[str, int] = {}
        #: Tokens that others have had in short steps beyond their share.
        self._light_tenant_credit = 0.0
        #: Whether others' prompts could take nothing of what the last one left to them.
        self._light_tenants_blocked = False

    def plan_prefill(self) -> tuple[PrefillBudget, ShortStep | None]:
        """The next step's prompt tokens, and how it's kept short, if it is.

        Prompts may take the whole token budget unless a sequence decodes in the step.
        """
        share, max_tokens = self._limits.share, self._limits.token_budget
        if not share.saturation_decodes and share.max_prompt_tokens >= max_tokens:
            return PrefillBudget(max_tokens), None  # no bound: nothing to count
        demand = StepDemand.from_running(self._runs.sequences)
        num_tokens = max_tokens
        if demand.rows:
            num_waiting = demand.pending + self._waiting.num_tokens
            num_tokens = min(share.prompt_tokens(demand.rows, num_waiting), max_tokens)
        short_step = self._plan_short_step(demand, num_tokens)
        if short_step is not None:
            # Its target is measured in steps with all that attention read.
            min_tokens = num_tokens = short_step.light_tenant_prompt_tokens
        elif demand.rows:
            min_tokens = min(share.min_prompt_tokens(demand.rows), max_tokens)
        else:
            return PrefillBudget(max_tokens), None
        budget = PrefillBudget(num_tokens, min_tokens, LEAST_OF_A_START, share.context_cost_tokens)
        return budget, short_step

    def _plan_short_step(self, work: StepDemand, room: int) -> ShortStep | None:
        """How to keep the step short; None: it's as it would be with one tenant.

        Args:
            work: of all that run.
            room: prompt tokens that the step may hold otherwise.
        """
        whole, waiting = self._limits.share.target_step_tokens, self._waiting
        if not whole or not waiting.fair:
            return None
        wanted = work.pending + waiting.num_tokens
        if work.rows + min(room, wanted) <= whole or not self._find_over():
            return None
        over = self._over
        own = self._work_of(over)
        prompts = own.pending + sum(waiting.num_tenant_tokens(quota.name) for quota in over)
        fed = min(room, prompts, max(0, self._limits.token_budget - work.rows))
        rows, others = work.rows - own.rows, min(wanted - prompts, room)
        part, others = self._parts(whole, rows, others)
        if own.rows + fed <= part:
            return None
        portion = part / (own.rows + fed)
        return ShortStep(whole, over, portion, math.ceil(fed * portion), others)

    def _parts(self, whole: int, rows: int, prompts: int) -> tuple[float, int]:
        """Tokens of a step for those over their share, and for others' prompts.

        The former get what others leave, and a quarter of their share beside others' prompts: so
        these meet a step that is shorter still, and rarely need a second one. But where others
        have been ahead for long, each gets his share. And always as many tokens for each row of
        others as their weights say.
        """
        fraction = min(sum(self._quotas.weight_fraction(quota) for quota in self._over), _MOST)
        as_many = fraction / (1 - fraction)
        share = fraction * whole
        if not prompts or self._light_tenants_blocked:
            taken, prompts, part = 0, min(prompts, whole), max(share, whole - rows)
        elif self._light_tenant_credit < _MOST_AHEAD * whole:
            part = share / 4
            taken = prompts = min(prompts, int(whole + part))
        else:
            taken = prompts = min(prompts, math.ceil(whole - share))
            part = share
        part = max(part, rows * as_many)
        self._light_tenant_credit = max(
            0.0, self._light_tenant_credit + rows + taken - part / as_many
        )
        return part, prompts

    def _find_over(self) -> bool:
        """Whether somebody holds so much that others, who were here lately, are below their share.

        By sequences that run (if none does, that wait): one who holds half as much again as its
        share, or leaves others less than half of theirs. Where all flood seats go by weights, so
        nobody does, and steps stay long.
        """
        candidates = dict.fromkeys((*self._runs.tenants, *self._over))
        self._over = [quota for quota in candidates if self._is_over(quota)]
        if not self._over:
            return False
        beside = any(quota not in self._over for quota in self._runs.tenants)
        return beside or self._quotas.has_other_recent_tenants(self._over)

    def _is_over(self, quota: TenantQuota) -> bool:
        fraction = self._quotas.weight_fraction(quota)
        total, held = len(self._runs.sequences), quota.running
        if not total:
            total, held = len(self._waiting), quota.sequences
        return held > total * min(1.5 * fraction, (1 + fraction) / 2)

    def _work_of(self, over: list[TenantQuota]) -> StepDemand:
        names = {quota.name for quota in over}
        return StepDemand.from_running(
            each for each in self._runs.sequences if each.request.message.tenant in names
        )

    def skipped(self, step: ShortStep) -> list[Sequence]:
        """Rows that sit out in this step; whoever has waited longest comes first.

        Urgent ones never do (`priority` below 0).
        """
        rows: dict[str, list[Sequence]] = {quota.name: [] for quota in step.heavy_tenants}
        for sequence in self._runs.sequences:
            own = rows.get(sequence.request.message.tenant)
            if own is not None and sequence.request.priority >= 0 and _is_row(sequence):
                own.append(sequence)
        found = [
            self._resting(name, own, math.ceil(len(own) * step.decode_fraction))
            for name, own in rows.items()
        ]
        self._last = {name: self._last[name] for name in rows if name in self._last}
        return [each for turn in zip_longest(*found) for each in turn if each is not None]

    def note_prompts(self, step: ShortStep, left: float) -> None:
        """So many tokens are left for others' prompts behind it; if that's all that it had for
        them, they wait for seats or blocks.
        """
        self._light_tenants_blocked = 0 < step.light_tenant_prompt_tokens <= left

    def record_decode(self, sequence: Sequence) -> None:
        """One that was to sit out didn't have to."""
        self._last[sequence.request.message.tenant] = sequence.seq_id

    def _resting(self, tenant: str, rows: list[Sequence], count: int) -> list[Sequence]:
        """The rows of a tenant that sit out where so many are dealt: by turns, in order of ids."""
        if count >= len(rows):
            return []
        rows.sort(key=lambda sequence: sequence.seq_id)
        first = bisect_right(rows, self._last.get(tenant, -1), key=lambda each: each.seq_id)
        rows = rows[first:] + rows[:first]
        self._last[tenant] = rows[count - 1].seq_id
        return rows[count:]


def _is_row(sequence: Sequence) -> bool:
    """Whether a running sequence decodes in the next step."""
    known = len(sequence.token_ids) + sequence.num_placeholders
    return bool(is_decode(known - sequence.num_computed_tokens))
