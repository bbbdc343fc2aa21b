"""`HeadTracking`: the sequences that a layer head tracks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf

from engine.scheduler import Sequence, StepPlan
from engine.speculative.loss_bound import LossBound

#: Weight of a new step in the average time of a prompt token.
_PROMPT_RATE = 0.3


class HeadTracking:
    """Sequences that a layer head tracks, as long as that pays.

    Such a head can draft for a sequence only if it received the model's hidden states of all of its
    tokens. That costs time even without drafts: a little in each step, and more for a prompt, for
    which the model's last layer otherwise computes only the last token. So a prompt is tracked
    while its tenant may read (`LossBound`), and the sequence afterwards while its drafts may have a
    cost. Once dropped, a sequence isn't tracked again until it is preempted and starts anew.
    """

    def __init__(self, cost_fraction: float) -> None:
        """`cost_fraction`: cost of the hidden states as a fraction of a prompt's time (assumed)."""
        self._cost_fraction = cost_fraction
        #: Tenants of tracked sequences.
        self._tenants: dict[int, str] = {}
        #: Number of tracked prompt tokens in the step, by tenant.
        self._prompt_tokens = Counter[str]()
        #: Seconds per prompt token; inf: unknown, so one prompt per step is tried.
        self._token_seconds = inf

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._tenants

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def remove(self, seq_id: int) -> None:
        """Stop tracking a sequence."""
        self._tenants.pop(seq_id, None)

    def untracked_sequences(
        self,
        plan: StepPlan,
        scheduled: list[Sequence],
        can_draft: Callable[[Sequence], bool],
        losses: LossBound | None,
        token_rate: float,
    ) -> list[int]:
        """Return the sequences of a step that are no longer tracked.

        Args:
            plan: the step, without drafts yet.
            scheduled: its sequences.
            can_draft: whether a new sequence may get drafts at all.
            losses: losses of the tenants in this step; None: all sequences are tracked.
            token_rate: tokens per second.
        """
        new = {row.seq_id: len(row.token_ids) - row.num_computed_tokens for row in plan.new}
        for seq_id in plan.removed:
            self.remove(seq_id)
        untracked, pending = list[int](), Counter[str]()
        for sequence in scheduled:
            seq_id, tenant = sequence.seq_id, sequence.request.message.tenant
            if seq_id in new:
                if can_draft(sequence) and (
                    losses is None or losses.can_read(tenant, pending[tenant])
                ):
                    pending[tenant] += new[seq_id] * self._token_seconds * token_rate  # type: ignore[assignment]
                    self._tenants[seq_id] = tenant
                    continue
            elif seq_id not in self._tenants or losses is None or losses.can_draft(tenant):
                continue
            self.remove(seq_id)
            untracked.append(seq_id)
        self._prompt_tokens = Counter()
        if plan.num_prompt_tokens:
            for sequence, count in zip(scheduled, plan.num_scheduled, strict=True):
                if count > 1 and sequence.seq_id in self._tenants:
                    self._prompt_tokens[sequence.request.message.tenant] += count
        return untracked

    def charge(
        self,
        plan: StepPlan,
        seconds: float,
        tracking_seconds: float,
        losses: LossBound,
        token_rate: float,
    ) -> None:
        """Charge tenants for a step of `seconds`, and for the seconds of saving its states."""
        tokens = self._prompt_tokens.total()
        if tracking_seconds and tokens:
            total = tracking_seconds + self._cost_fraction * seconds * tokens / plan.num_tokens
            if self._token_seconds == inf:
                self._token_seconds = total / tokens
            self._token_seconds += _PROMPT_RATE * (total / tokens - self._token_seconds)
            for tenant, count in self._prompt_tokens.items():
                losses.charge_reading(tenant, total * token_rate * count / tokens)
        elif tracking_seconds:
            rows = Counter(self._tenants[row] for row in plan.seq_ids if row in self._tenants)
            for tenant, count in rows.items():
                losses.charge(tenant, tracking_seconds * token_rate * count / rows.total())
        self._prompt_tokens = Counter()
