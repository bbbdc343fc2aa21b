"""Leases: one worker at a time does a piece of work, and another takes over from a dead one.

Each is one conditional UPDATE, so that of two workers that try, one wins.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone

from storage.access import is_free, open_batches, open_responses
from storage.models import Batch, StoredResponse

Work = Batch | StoredResponse


def claim_batch(*, public_id: str, owner: str, seconds: float) -> Batch | None:
    """The batch if it's open, nobody else holds it and its tenant has room, else None."""
    if not _claim(open_batches(), public_id, owner, seconds, "TENANT_RUNNING_BATCHES"):
        return None
    return Batch.objects.select_related("tenant").get(public_id=public_id)


def claim_response(*, public_id: str, owner: str, seconds: float) -> StoredResponse | None:
    """The background response if it's to be made, free, and its tenant has room, else None."""
    if not _claim(open_responses(), public_id, owner, seconds, "TENANT_RUNNING_RESPONSES"):
        return None
    return StoredResponse.objects.select_related("tenant").get(public_id=public_id)


def _claim(
    rows: QuerySet[Any], public_id: str, owner: str, seconds: float, per_tenant: str
) -> bool:
    """Take the lease. Workers that count at once may run some more than a tenant's share."""
    mine = rows.filter(public_id=public_id)
    tenant = mine.values_list("tenant_id", flat=True).first()
    if rows.filter(~is_free(), tenant_id=tenant).count() >= settings.QUIRE[per_tenant]:
        return False
    until = timezone.now() + timedelta(seconds=seconds)
    return bool(mine.filter(is_free()).update(lease_owner=owner, lease_until=until))


def renew_lease(*, row: Work, owner: str, seconds: float) -> bool:
    """Hold it for so many seconds more; False when it's another's by now."""
    until = timezone.now() + timedelta(seconds=seconds)
    mine = type(row).objects.filter(pk=row.pk, lease_owner=owner)
    return bool(mine.update(lease_until=until))


def owner_of(process: int) -> str:
    """What the names of all owners in this process of this machine begin with."""
    return f"{socket.gethostname()[:20]}-{process}-"


def release_leases_of_dead(*, process: int) -> int:
    """Let others take at once what a process of this machine held that has ended; how many."""
    given_back = 0
    for kind in (Batch, StoredResponse):
        held = kind.objects.filter(lease_owner__startswith=owner_of(process))
        given_back += held.update(lease_owner="", lease_until=None)
    return given_back


def release_lease(*, row: Work, owner: str) -> None:
    """Let another worker take it at once."""
    mine = type(row).objects.filter(pk=row.pk, lease_owner=owner)
    mine.update(lease_owner="", lease_until=None)
