"""How much a tenant's stored answers and conversations take, as each process knows it.

The database is asked once a minute.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from django.conf import settings
from django.core.signals import setting_changed
from django.db.models import Sum

from storage.errors import StorageFull
from storage.models import ItemConversation, SavedConversation, StoredCompletion, StoredResponse

FRESH_S = 60.0


@dataclass(slots=True)
class _Known:
    """`size`: in characters. `at`: `time.monotonic()` when the database was asked."""

    size: int
    at: float


_known: dict[int, _Known] = {}


def limit() -> int:
    """The most that a tenant's answers may take; 0 is no limit."""
    return int(settings.QUIRE["TENANT_STORED_CHARS"])


def is_known(tenant_id: int) -> bool:
    """Whether `check_answers` need not ask the database before. Of a full tenant it always is."""
    known = _known.get(tenant_id)
    if not limit():
        return True
    return known is not None and known.size < limit() and time.monotonic() - known.at < FRESH_S


def check_answers(tenant_id: int) -> None:
    """Raise `StorageFull` when the tenant has no room for another answer. May block.

    Processes count for themselves between two looks: a tenant can go over by what it stores in a
    minute.
    """
    if not is_known(tenant_id):
        size = sum(
            int(kind.objects.filter(tenant_id=tenant_id).aggregate(sum=Sum("size"))["sum"] or 0)
            for kind in (StoredResponse, StoredCompletion, SavedConversation, ItemConversation)
        )
        if len(_known) > 10_000:
            _known.clear()
        _known[tenant_id] = _Known(size, time.monotonic())
    most = limit()
    if most and _known[tenant_id].size >= most:
        raise StorageFull(
            f"This tenant's stored answers may take {most} characters and do. Delete some, or set "
            "store to false.",
            param="store",
        )


def note_answer(tenant_id: int, size: int) -> None:
    """An answer of so many characters was stored."""
    known = _known.get(tenant_id)
    if known is not None:
        known.size += size


def forget(**_: object) -> None:
    """Ask again."""
    _known.clear()


setting_changed.connect(forget, dispatch_uid="storage.room")
