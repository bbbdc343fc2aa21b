"""The one way to read stored objects. A stranger's object, or one that has expired, is 404."""

from __future__ import annotations

from typing import Any, TypeVar

from django.conf import settings
from django.db.models import Count, F, OuterRef, Q, QuerySet, Subquery, Sum, Window
from django.db.models.functions import Coalesce, RowNumber
from django.utils import timezone

from engine.errors import InvalidRequest
from storage.blobs import blob_path
from storage.errors import NotFound
from storage.ids import is_id
from storage.models import Batch, BatchStatus, ResponseStatus, StoredFile, StoredResponse
from storage.models.batch import OPEN
from tenants.authentication import Caller

__all__ = [
    "Batch",
    "BatchStatus",
    "ResponseStatus",
    "StoredFile",
    "StoredResponse",
    "access_batch",
    "access_batches",
    "access_conversation",
    "access_file",
    "access_files",
    "access_response",
    "blob_path",
    "is_free",
    "open_batches",
    "open_responses",
    "page",
    "stored_bytes",
    "unclaimed_batches",
    "unclaimed_responses",
]

T = TypeVar("T", StoredFile, Batch, StoredResponse)
#: Responses that one conversation may go back.
MAX_TURNS = 1000


def _of(model: type[T], tenant_id: int) -> QuerySet[T]:
    return model.objects.filter(tenant_id=tenant_id)  # type: ignore[return-value]


def _live(rows: QuerySet[T]) -> QuerySet[T]:
    return rows.filter(Q(expires_at=None) | Q(expires_at__gt=timezone.now()))


def _one(rows: QuerySet[T], public_id: str, what: str, param: str) -> T:
    row = rows.filter(public_id=public_id).first() if is_id(public_id) else None
    if row is None:
        raise NotFound(f"No such {what}: {public_id[:80]!r}.", param=param)
    return row


def access_files(caller: Caller) -> QuerySet[StoredFile]:
    """The tenant's files that haven't expired."""
    return _live(_of(StoredFile, caller.tenant_id))


def access_file(caller: Caller, public_id: str, param: str = "id") -> StoredFile:
    """Raises `NotFound`."""
    return _one(access_files(caller), public_id, "File object", param)


def access_batches(caller: Caller) -> QuerySet[Batch]:
    """The tenant's batches."""
    return _of(Batch, caller.tenant_id).select_related("output_file", "error_file")


def access_batch(caller: Caller, public_id: str) -> Batch:
    """Raises `NotFound`."""
    return _one(access_batches(caller), public_id, "batch", "id")


def access_response(caller: Caller, public_id: str, param: str = "response_id") -> StoredResponse:
    """Raises `NotFound`."""
    rows = _live(_of(StoredResponse, caller.tenant_id))
    return _one(rows, public_id, "response", param)


def access_conversation(caller: Caller, public_id: str) -> list[StoredResponse]:
    """The response and those before it, oldest first.

    Raises: `NotFound` naming `previous_response_id` when one of them is gone.
    """
    found: list[StoredResponse] = []
    wanted = public_id
    while wanted:
        if len(found) >= MAX_TURNS:
            raise InvalidRequest(
                f"A conversation may hold at most {MAX_TURNS} responses.",
                param="previous_response_id",
            )
        row = _previous(caller, wanted)
        found.append(row)
        wanted = row.previous_id
    return found[::-1]


def _previous(caller: Caller, public_id: str) -> StoredResponse:
    try:
        return access_response(caller, public_id, "previous_response_id")
    except NotFound as error:
        error.code = "previous_response_not_found"  # what OpenAI's clients look for
        raise


def page(
    rows: QuerySet[T], *, limit: int, after: str | None, newest_first: bool = True
) -> tuple[list[T], bool]:
    """One page behind the object `after`, and whether more follow. Raises `NotFound` for `after`.

    Rows are in the order of their making, which their numbers keep.
    """
    sign = "-" if newest_first else ""
    if after:
        cursor = _one(rows, after, "object", "after")
        rows = rows.filter(pk__lt=cursor.pk) if newest_first else rows.filter(pk__gt=cursor.pk)
    found = list(rows.order_by(f"{sign}pk")[: limit + 1])
    return found[:limit], len(found) > limit


def stored_bytes(tenant_id: int) -> int:
    """What a tenant's files take."""
    total: dict[str, Any] = _of(StoredFile, tenant_id).aggregate(sum=Sum("size", default=0))
    return int(total["sum"])


def open_batches() -> QuerySet[Batch]:
    """Batches that want a worker or have one."""
    return Batch.objects.filter(status__in=OPEN)


def open_responses() -> QuerySet[StoredResponse]:
    """Background responses that want a worker or have one."""
    wanted = (ResponseStatus.QUEUED, ResponseStatus.IN_PROGRESS)
    return StoredResponse.objects.filter(background=True, status__in=wanted)


def unclaimed_batches() -> list[str]:
    """Ids of batches that want a worker, have none and may run now, in the order of their turns."""
    return _unclaimed(open_batches(), settings.QUIRE["TENANT_RUNNING_BATCHES"])


def unclaimed_responses() -> list[str]:
    """The same of background responses."""
    return _unclaimed(open_responses(), settings.QUIRE["TENANT_RUNNING_RESPONSES"])


def is_free() -> Q:
    """Whether no worker holds a row's lease."""
    return Q(lease_until=None) | Q(lease_until__lte=timezone.now())


def _unclaimed(rows: QuerySet[Any], per_tenant: int) -> list[str]:
    """Tenants take turns: nobody's long queue stands before another's first piece of work."""
    held = rows.filter(~is_free(), tenant=OuterRef("tenant")).order_by().values("tenant")
    turns = rows.filter(is_free()).annotate(
        running=Coalesce(Subquery(held.annotate(n=Count("pk")).values("n")), 0),
        place=Window(RowNumber(), partition_by="tenant_id", order_by="pk"),
    )
    mine = turns.annotate(turn=F("running") + F("place")).filter(turn__lte=per_tenant)
    return list(mine.order_by("turn", "pk").values_list("public_id", flat=True)[:100])
