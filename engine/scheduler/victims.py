"""Who gives blocks back when there are too few."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List

from engine.kv_cache.block import TenantQuota
from engine.kv_cache.quotas import TenantQuotas
from engine.scheduler.sequence import Sequence


def choose_victim(
    running: List[Sequence],
    quotas: TenantQuotas,
    taker: TenantQuota,
    *,
    by_priority: bool,
    own_only: bool = False,
    over_share: bool = False,
    spares_first: bool = False,
    lends: Callable[[Sequence], bool] = lambda sequence: False,
) -> Sequence | None:
    """The running sequence to preempt so that a tenant gets blocks.

    The last sequence of the tenant that is most over its share; where priorities count, the lowest
    goes first. Whoever uses no more than his reserve gives nothing to others. The first that runs
    never gives but to a reserve: it ends one day, and so everyone's turn comes, while two tenants
    that took from each other what they had just got would never end.

    Args:
        running: in order; the last of a tenant goes before its others.
        quotas: everyone's blocks.
        taker: for whom.
        by_priority: `running` is in order of priority, and only the lowest that can give does.
        own_only: the tenant is at its maximum, so that only its own blocks help.
        over_share: only others who are over their share give, the first that runs too.
        spares_first: it never gives.
        lends: whether others rely in this step on what a sequence computes; it can't give then.

    Returns None when nobody can give.
    """
    chosen: Sequence | None = None
    most = 0.0
    seen: set[str] = set()
    for sequence in reversed(running if over_share and not spares_first else running[1:]):
        urgency = sequence.request.priority
        if chosen is not None and by_priority and urgency < chosen.request.priority:
            break
        name = sequence.request.message.tenant
        if name in seen:
            continue
        quota = quotas.of(name)
        own = quota is taker
        if (own and over_share) or (own_only and not own):
            continue
        if lends(sequence):
            continue
        seen.add(name)
        excess = quotas.excess(quota, quota.used)
        if not own and (quota.used <= quota.reserved or (over_share and excess <= 1)):
            continue
        if chosen is None or excess > most:
            chosen, most = sequence, excess
    return chosen
