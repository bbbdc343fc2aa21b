"""Leases: one worker at a time does a piece of work, and another takes over from a dead one.

Each is one conditional UPDATE, so that of two workers that try, one wins.
"""

from __future__ import annotations

from datetime import timedelta

from django.db.models import Q
from django.utils import timezone

from storage.models import Batch, ResponseStatus, StoredResponse
from storage.models.batch import OPEN

Work = Batch | StoredResponse


def claim_batch(*, public_id: str, owner: str, seconds: float) -> Batch | None:
    """The batch if it's open and nobody else holds it, else None."""
    rows = Batch.objects.filter(public_id=public_id, status__in=OPEN)
    if not _claim(rows, owner, seconds):
        return None
    return Batch.objects.select_related("tenant").get(public_id=public_id)


def claim_response(*, public_id: str, owner: str, seconds: float) -> StoredResponse | None:
    """The background response if it's to be made and nobody else holds it, else None."""
    wanted = (ResponseStatus.QUEUED, ResponseStatus.IN_PROGRESS)
    rows = StoredResponse.objects.filter(public_id=public_id, background=True, status__in=wanted)
    if not _claim(rows, owner, seconds):
        return None
    return StoredResponse.objects.select_related("tenant").get(public_id=public_id)


def _claim(rows: object, owner: str, seconds: float) -> bool:
    now = timezone.now()
    free = Q(lease_until=None) | Q(lease_until__lte=now)
    until = now + timedelta(seconds=seconds)
    return bool(rows.filter(free).update(lease_owner=owner, lease_until=until))  # type: ignore[attr-defined]


def renew_lease(*, row: Work, owner: str, seconds: float) -> bool:
    """Hold it for so many seconds more; False when it's another's by now."""
    until = timezone.now() + timedelta(seconds=seconds)
    mine = type(row).objects.filter(pk=row.pk, lease_owner=owner)
    return bool(mine.update(lease_until=until))


def release_lease(*, row: Work, owner: str) -> None:
    """Let another worker take it at once."""
    mine = type(row).objects.filter(pk=row.pk, lease_owner=owner)
    mine.update(lease_owner="", lease_until=None)
