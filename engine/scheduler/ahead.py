"""What a new sequence finds before it, for its flight record."""

from __future__ import annotations

from collections.abc import Iterable

from engine.contract.protocol import MOST_NAMED
from engine.kv_cache import TenantQuota
from engine.scheduler.queue import WaitingQueue
from engine.scheduler.sequence import Sequence


def note_ahead(
    sequence: Sequence, quota: TenantQuota, running: list[Sequence], waiting: WaitingQueue
) -> None:
    """Record how many run or wait, and of the sequence's own tenant also who."""
    flight, own = sequence.flight, quota.sequences
    flight.num_ahead, flight.num_ahead_own = len(running) + len(waiting), own
    if own:
        head = waiting.head_of(quota.name)
        flight.behind = _named(quota.name, running, head, min(own, MOST_NAMED))


def _named(tenant: str, running: Iterable[Sequence], head: Sequence | None, most: int) -> list[str]:
    """Ids of the tenant's requests: of those that run, then of the one that is next."""
    found: list[str] = []
    for other in running:
        request = other.request
        if request.message.tenant == tenant and request.request_id not in found:
            found.append(request.request_id)
            if len(found) == most:
                return found
    if head is not None and head.request.request_id not in found:
        found.append(head.request.request_id)
    return found
