"""What drafts may cost each tenant."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine.speculative.acceptance import MAX_TENANTS

# Limits of a tenant's loss, in tokens per row: while it is below, drafts may cost something, looks
# for drafts in text may, and another sequence may be read.
_MAX_LOSS, _MAX_LOSS_TO_LOOK_UP, _MAX_LOSS_TO_READ = 0.55, 0.4, 0.4
#: Savings that count, and those that outlast the sequence whose drafts brought them.
_MAX_SAVINGS, _MAX_LASTING_SAVINGS = 2.0, 0.3
#: The loss is reduced by this part of each token, so that drafts are tried again.
_RECOVERY = 0.006


@dataclass(slots=True)
class _Loss:
    """A tenant's loss.

    Attributes:
        rows: the tenant's, in this step.
        tokens: per row, at `step`; below 0: savings.
        max_tokens: drafts may cost something up to here: `_MAX_LOSS`, and the longest reading since
            the loss was 0, for drafts are what brings that back.
    """

    rows: int
    step: int
    tokens: float = 0.0
    max_tokens: float = _MAX_LOSS


class LossBound:
    """Bounds what drafts cost each tenant, for chances may be wrong for as long as texts deceive.

    A tenant's loss is the time that its drafts took less the time that they saved, in tokens per
    row: many rows may lose more than one, few rows don't start with the loss of many, nor many with
    new credit. No tenant pays for another, and one's drafts don't depend on another's texts.
    """

    def __init__(self) -> None:
        #: Least recently used first.
        self._losses: OrderedDict[str, _Loss] = OrderedDict()

    def begin_step(self, step: int, rows: dict[str, int]) -> None:
        """Set the number of each tenant's rows in this step."""
        for tenant, count in rows.items():
            loss = self._losses.setdefault(tenant, _Loss(count, step))
            loss.tokens = max(loss.tokens - _RECOVERY * (step - loss.step), -_MAX_SAVINGS)
            if loss.tokens <= 0.0:
                loss.max_tokens = _MAX_LOSS
            loss.rows, loss.step = count, step
            self._losses.move_to_end(tenant)
            if len(self._losses) > MAX_TENANTS:
                self._losses.popitem(last=False)

    def end_sequence(self, tenant: str) -> None:
        """Take back a finished sequence's part of the savings: the next text may be another."""
        if (loss := self._losses.get(tenant)) is not None:
            loss.tokens += max(0.0, -loss.tokens - _MAX_LASTING_SAVINGS) / loss.rows

    def budget(self, tenant: str) -> float:
        """Tokens that its drafts may cost in this step."""
        loss = self._losses[tenant]
        return (loss.max_tokens - loss.tokens) * loss.rows

    def can_look_up(self, tenant: str, tokens: float) -> bool:
        """Whether looking for drafts may take the time of `tokens`."""
        loss = self._losses[tenant]
        return loss.tokens + tokens / loss.rows <= _MAX_LOSS_TO_LOOK_UP

    def can_read(self, tenant: str, pending: float = 0.0) -> bool:
        """Whether one more sequence may be read, beside others that take `pending` tokens."""
        loss = self._losses[tenant]
        return loss.tokens + pending / loss.rows <= _MAX_LOSS_TO_READ

    def can_draft(self, tenant: str) -> bool:
        """Whether its drafts may cost anything."""
        return self.budget(tenant) > 0.0

    def charge(self, tenant: str, tokens: float) -> None:
        """Add what its drafts took; below 0: what they saved."""
        if (loss := self._losses.get(tenant)) is not None:
            loss.tokens += tokens / loss.rows

    def charge_reading(self, tenant: str, tokens: float) -> None:
        """Add what reading its sequences took, which leaves its drafts their budget."""
        self.charge(tenant, tokens)
        loss = self._losses[tenant]
        loss.max_tokens = max(loss.max_tokens, _MAX_LOSS + tokens / loss.rows)
