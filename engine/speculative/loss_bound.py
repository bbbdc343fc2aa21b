"""`LossBound`: limits the time that each tenant may lose by drafts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine.speculative.acceptance import MAX_TENANTS

# Upper limits of a tenant's loss in tokens per row, at which drafts may still have a cost, texts
# may still be searched for drafts, and another sequence may still be read.
_MAX_LOSS, _MAX_LOSS_TO_LOOK_UP, _MAX_LOSS_TO_READ = 0.55, 0.4, 0.4
#: Maximum savings, and the maximum that remains after the sequence that achieved them.
_MAX_SAVINGS, _MAX_LASTING_SAVINGS = 2.0, 0.3
#: Reduction of the loss per step, so that drafts are tried again.
_RECOVERY = 0.006


@dataclass(slots=True)
class _Loss:
    """A tenant's loss.

    Attributes:
        rows: number of the tenant's rows in this step.
        tokens: loss per row in tokens, as of `step`; negative: savings.
        max_tokens: limit of the loss: `_MAX_LOSS` plus the longest reading since the loss was 0,
            which only drafts can recover.
    """

    rows: int
    step: int
    tokens: float = 0.0
    max_tokens: float = _MAX_LOSS


class LossBound:
    """Limits the cost of drafts per tenant, since some texts mislead the estimated acceptance.

    A tenant's loss is the time that its drafts took minus the time that they saved, in tokens per
    row. Per row, so that the limit grows with the rows, and a change of their number neither
    multiplies a loss nor adds credit. No tenant pays for another, and a tenant's drafts don't
    depend on the texts of others.
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
        """Remove a finished sequence's part of the savings: the next text may differ."""
        if (loss := self._losses.get(tenant)) is not None:
            loss.tokens += max(0.0, -loss.tokens - _MAX_LASTING_SAVINGS) / loss.rows

    def budget(self, tenant: str) -> float:
        """Return the number of tokens that the tenant's drafts may cost in this step."""
        loss = self._losses[tenant]
        return (loss.max_tokens - loss.tokens) * loss.rows

    def can_look_up(self, tenant: str, tokens: float) -> bool:
        """Whether a lookup may cost as much time as `tokens` tokens."""
        loss = self._losses[tenant]
        return loss.tokens + tokens / loss.rows <= _MAX_LOSS_TO_LOOK_UP

    def can_read(self, tenant: str, pending: float = 0.0) -> bool:
        """Whether another sequence may be read, besides those that cost `pending` tokens."""
        loss = self._losses[tenant]
        return loss.tokens + pending / loss.rows <= _MAX_LOSS_TO_READ

    def can_draft(self, tenant: str) -> bool:
        """Whether the tenant's drafts may have a cost."""
        return self.budget(tenant) > 0.0

    def charge(self, tenant: str, tokens: float) -> None:
        """Add the cost of the tenant's drafts in tokens; negative: savings."""
        if (loss := self._losses.get(tenant)) is not None:
            loss.tokens += tokens / loss.rows

    def charge_reading(self, tenant: str, tokens: float) -> None:
        """Add the cost of reading sequences, and raise the limit so that drafts keep a budget."""
        self.charge(tenant, tokens)
        loss = self._losses[tenant]
        loss.max_tokens = max(loss.max_tokens, _MAX_LOSS + tokens / loss.rows)
