"""The only functions that read stored objects. Others' and expired objects are 404."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, TypeVar

from django.conf import settings
from django.db.models import Count, F, OuterRef, Q, QuerySet, Subquery, Sum, TextField, Window
from django.db.models.functions import Cast, Coalesce, Length, RowNumber
from django.utils import timezone

from common.db import iterate_by_key
from common.errors import NotFound
from common.files import is_id
from engine.contract.errors import InvalidRequest
from storage.blobs import blob_url, open_blob
from storage.models import (
    OPEN,
    Batch,
    BatchStatus,
    ConversationItem,
    ItemConversation,
    PlaygroundPreset,
    ResponseStatus,
    SavedConversation,
    StoredCompletion,
    StoredFile,
    StoredResponse,
    StoredUpload,
    UploadPart,
    UploadStatus,
)
from tenants.access import access_tenants
from tenants.authentication import Caller
from tenants.models import Tenant, User

# Conversations are visible to the user who had them, and in their tenants if shared. Everything
# else is 404.

#: Maximum length of a list.
MAX_LISTED = 50
MAX_SEARCH_CHARS = 200


def access_conversations(
    user: User, tenant: Tenant, search: str = "", cursor: str = "", folder: str = ""
) -> list[SavedConversation]:
    """The user's conversations in a tenant, last changed first, without documents.

    Returns up to `MAX_LISTED` + 1.

    Args:
        search: words that must all occur. cursor: id of the previous page's last conversation.
        folder: restricts the list; "" for all conversations.
    """
    rows = _of(user).filter(tenant=tenant, user=user)
    if folder:
        rows = rows.filter(folder=folder.replace("\0", ""))
    for word in search[:MAX_SEARCH_CHARS].replace("\0", "").lower().split():
        rows = rows.filter(words__contains=word)
    if cursor:
        last = access_own_conversation(user, cursor)
        earlier = Q(changed_at=last.changed_at, pk__lt=last.pk)
        rows = rows.filter(Q(changed_at__lt=last.changed_at) | earlier)
    ordered = rows.defer("document", "words").order_by("-changed_at", "-pk")
    return list(ordered[: MAX_LISTED + 1])


def access_folders(user: User, tenant: Tenant) -> list[str]:
    """Names of the user's folders in a tenant, sorted."""
    rows = _of(user).filter(tenant=tenant, user=user).exclude(folder="")
    return list(rows.order_by("folder").values_list("folder", flat=True).distinct())


def access_presets(user: User, tenant: Tenant) -> QuerySet[PlaygroundPreset]:
    """A tenant's presets by name, for its members."""
    rows = PlaygroundPreset.objects.select_related("tenant", "user")
    return rows.filter(tenant__in=access_tenants(user), tenant=tenant, tenant__active=True)


def access_preset(user: User, public_id: str) -> PlaygroundPreset:
    """A preset of one of the user's tenants. Raises `NotFound`."""
    rows = PlaygroundPreset.objects.select_related("tenant", "user")
    rows = rows.filter(tenant__in=access_tenants(user), tenant__active=True)
    row = rows.filter(public_id=public_id).first() if is_id(public_id) else None
    if row is None:
        raise NotFound("Preset not found.", param="preset")
    return row


def access_own_conversation(user: User, public_id: str) -> SavedConversation:
    """A conversation that the user may change. Raises `NotFound`."""
    return _one(_of(user).filter(user=user), public_id)


def access_conversation(user: User, public_id: str) -> SavedConversation:
    """One that the user may read: their own, or one shared in their tenants. Raises `NotFound`."""
    return _one(_of(user).filter(Q(user=user) | Q(shared_at__isnull=False)), public_id)


def _live() -> QuerySet[SavedConversation]:
    rows = SavedConversation.objects.select_related("tenant", "user")
    return rows.filter(Q(expires_at=None) | Q(expires_at__gt=timezone.now()), tenant__active=True)


def _of(user: User) -> QuerySet[SavedConversation]:
    return _live().filter(tenant__in=access_tenants(user))


def _one(rows: QuerySet[SavedConversation], public_id: str) -> SavedConversation:
    row = rows.filter(public_id=public_id).first() if is_id(public_id) else None
    if row is None:
        raise NotFound("Conversation not found.", param="conversation")
    return row


T = TypeVar("T", StoredFile, Batch, StoredResponse, StoredCompletion, StoredUpload)
#: Endpoint of requests in Anthropic's batches, which are listed separately.
MESSAGES = "/v1/messages"
#: Maximum number of previous responses in a conversation.
MAX_TURNS = 1000
#: Maximum size of all their items as JSON, more than any context holds.
MAX_CONVERSATION_CHARS = 32 << 20


def _for_tenant(model: type[T], tenant_id: int) -> QuerySet[T]:
    return model.objects.filter(tenant_id=tenant_id)


def _not_expired(rows: QuerySet[T]) -> QuerySet[T]:
    return rows.filter(Q(expires_at=None) | Q(expires_at__gt=timezone.now()))


def _get_or_404(rows: QuerySet[T], public_id: str, what: str, param: str) -> T:
    row = rows.filter(public_id=public_id).first() if is_id(public_id) else None
    if row is None:
        raise NotFound(f"No such {what}: {public_id[:80]!r}.", param=param)
    return row


def access_files(caller: Caller) -> QuerySet[StoredFile]:
    """The tenant's files that haven't expired."""
    return _not_expired(_for_tenant(StoredFile, caller.tenant_id))


def access_file(caller: Caller, public_id: str, param: str = "id") -> StoredFile:
    """Raises `NotFound`."""
    return _get_or_404(access_files(caller), public_id, "File object", param)


def access_upload(caller: Caller, public_id: str) -> StoredUpload:
    """Raises `NotFound`."""
    rows = _not_expired(_for_tenant(StoredUpload, caller.tenant_id)).select_related("file")
    return _get_or_404(rows, public_id, "Upload object", "upload_id")


def access_batches(caller: Caller) -> QuerySet[Batch]:
    return _for_tenant(Batch, caller.tenant_id).select_related("output_file", "error_file")


def access_batch(caller: Caller, public_id: str) -> Batch:
    """Raises `NotFound`."""
    return _get_or_404(access_batches(caller), public_id, "batch", "id")


def access_completions(
    caller: Caller, model: str | None = None, metadata: Mapping[str, str] | None = None
) -> QuerySet[StoredCompletion]:
    """The tenant's chat completions; with `metadata` a superset of the matches, as databases differ
    in which texts they consider equal.
    """
    rows = _not_expired(_for_tenant(StoredCompletion, caller.tenant_id))
    if model:
        rows = rows.filter(model=model)
    for pair in (metadata or {}).items():
        text = json.dumps(dict([pair]))[1:-1]
        rows = rows.annotate(text=Cast("metadata", TextField())).filter(text__contains=text)
    return rows


def access_completion(caller: Caller, public_id: str) -> StoredCompletion:
    """Raises `NotFound`."""
    return _get_or_404(access_completions(caller), public_id, "chat completion", "completion_id")


def access_response(caller: Caller, public_id: str, param: str = "response_id") -> StoredResponse:
    """Raises `NotFound`."""
    rows = _not_expired(_for_tenant(StoredResponse, caller.tenant_id))
    return _get_or_404(rows, public_id, "response", param)


#: Number of digits that a response's id shares with its items' ids; the others number the items.
_SHARED_DIGITS = 28


def item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of an item in a response's output, from which the response can be looked up."""
    digits = response_id.removeprefix("resp_")
    return f"{prefix}{digits[:_SHARED_DIGITS]}{index:04x}"


def access_output_items(caller: Caller, ids: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Items of stored responses by their ids.

    Args:
        ids: each with the request field that refers to it.

    Raises: `NotFound` naming the field; `InvalidRequest` if the items are too large to be read.
    """
    items: dict[str, dict[str, Any]] = {}
    num_chars = 0
    rows = _not_expired(_for_tenant(StoredResponse, caller.tenant_id))
    for public_id, param in ids.items():
        if public_id not in items and is_id(public_id):
            start = f"resp_{public_id.partition('_')[2][:_SHARED_DIGITS]}"
            row = rows.filter(public_id__gte=start, public_id__lt=f"{start}g").first()
            num_chars += row.size if row is not None else 0
            output = row.body["output"] if row is not None else []
            items |= {item["id"]: item for item in output}
        if public_id not in items:
            raise NotFound(f"No such item: {public_id[:80]!r}.", param=param)
        if num_chars > MAX_CONVERSATION_CHARS:
            raise InvalidRequest(
                f"A conversation may hold at most {MAX_CONVERSATION_CHARS} characters.",
                param=param,
            )
    return items


def access_response_chain(caller: Caller, public_id: str) -> tuple[list[StoredResponse], int]:
    """The response and its predecessors, oldest first, without requests; and their characters.

    Raises: `NotFound` naming `previous_response_id` if one of them was deleted; `InvalidRequest` if
    they are too large to be read.
    """
    responses: list[StoredResponse] = []
    next_id, num_chars = public_id, 0
    while next_id:
        if len(responses) >= MAX_TURNS or num_chars > MAX_CONVERSATION_CHARS:
            raise InvalidRequest(
                f"A conversation may hold at most {MAX_TURNS} responses and "
                f"{MAX_CONVERSATION_CHARS} characters.",
                param="previous_response_id",
            )
        row = _previous(caller, next_id)
        responses.append(row)
        next_id, num_chars = row.previous_id, num_chars + row.chars
    return responses[::-1], num_chars


def _previous(caller: Caller, public_id: str) -> Any:
    """A response annotated with `chars`, its length, which the database computes."""
    rows = _not_expired(_for_tenant(StoredResponse, caller.tenant_id)).defer("request")
    rows = rows.annotate(chars=Length("input_items") + Length("body"))
    try:
        return _get_or_404(rows, public_id, "response", "previous_response_id")
    except NotFound as error:
        error.code = "previous_response_not_found"  # OpenAI's error code
        raise


def page(
    rows: QuerySet[T],
    *,
    limit: int,
    after: str | None,
    newest_first: bool = True,
    matches: Callable[[T], bool] | None = None,
) -> tuple[list[T], bool]:
    """The page after the object `after`, and whether more follow. Raises `NotFound` for `after`.

    Rows are in the order of their creation, which is that of their primary keys.

    Args:
        matches: filters rows by conditions that the query can't express exactly.
    """
    sign = "-" if newest_first else ""
    if after:
        cursor = _get_or_404(rows, after, "object", "after")
        rows = rows.filter(pk__lt=cursor.pk) if newest_first else rows.filter(pk__gt=cursor.pk)
    if matches is None:
        selected = list(rows.order_by(f"{sign}pk")[: limit + 1])
    else:
        candidates = iterate_by_key(rows, newest_first=newest_first)
        selected = list(islice(filter(matches, candidates), limit + 1))
    return selected[:limit], len(selected) > limit


def stored_bytes(tenant_id: int) -> int:
    """Bytes of a tenant's files, and of the parts of unfinished uploads."""
    total: dict[str, Any] = _for_tenant(StoredFile, tenant_id).aggregate(sum=Sum("size", default=0))
    pending = {"upload__tenant_id": tenant_id, "upload__status": UploadStatus.PENDING}
    parts: dict[str, Any] = UploadPart.objects.filter(**pending).aggregate(
        sum=Sum("size", default=0)
    )
    return int(total["sum"]) + int(parts["sum"])


def open_batches() -> QuerySet[Batch]:
    """Batches that need a worker or have one."""
    return Batch.objects.filter(status__in=OPEN)


def open_responses() -> QuerySet[StoredResponse]:
    """Background responses that need a worker or have one."""
    states = (ResponseStatus.QUEUED, ResponseStatus.IN_PROGRESS)
    return StoredResponse.objects.filter(background=True, status__in=states)


def claimable_batches() -> list[str]:
    """Ids of batches that need a worker, have none and may run now, in the order to run them."""
    return _unclaimed(open_batches(), settings.QUIRE.tenant_quotas.running_batches)


def unclaimed_responses() -> list[str]:
    """Background responses without a lease, like `unclaimed_batches`."""
    return _unclaimed(open_responses(), settings.QUIRE.tenant_quotas.running_responses)


def lease_is_free() -> Q:
    """Condition for rows that no worker leases."""
    return Q(lease_until=None) | Q(lease_until__lte=timezone.now())


def _unclaimed(rows: QuerySet[Any], per_tenant: int) -> list[str]:
    """Round-robin over tenants: one tenant's long queue doesn't delay another's first job."""
    claimed = rows.filter(~lease_is_free(), tenant=OuterRef("tenant")).order_by().values("tenant")
    turns = rows.filter(lease_is_free()).annotate(
        running=Coalesce(Subquery(claimed.annotate(n=Count("pk")).values("n")), 0),
        place=Window(RowNumber(), partition_by="tenant_id", order_by="pk"),
    )
    mine = turns.annotate(turn=F("running") + F("place")).filter(turn__lte=per_tenant)
    return list(mine.order_by("turn", "pk").values_list("public_id", flat=True)[:100])


#: Maximum size of a conversation.
MAX_ITEMS = 10_000


def access_item_conversation(
    caller: Caller, public_id: str, param: str = "conversation_id"
) -> ItemConversation:
    """Raises `NotFound`."""
    live = Q(expires_at=None) | Q(expires_at__gt=timezone.now())
    rows = ItemConversation.objects.filter(live, tenant_id=caller.tenant_id)
    row = rows.filter(public_id=public_id).first() if is_id(public_id) else None
    if row is None:
        raise NotFound(f"No such conversation: {public_id[:80]!r}.", param=param)
    return row


def access_item(caller: Caller, conversation_id: str, item_id: str) -> ConversationItem:
    """An item of a conversation. Raises `NotFound`."""
    row = access_item_conversation(caller, conversation_id)
    return _item(row, item_id, "item_id")


def _item(row: ItemConversation, item_id: str, param: str) -> ConversationItem:
    item = row.items.filter(public_id=item_id[:64]).first() if "\0" not in item_id else None
    if item is None or item.public_id != item_id:
        raise NotFound(f"No such item: {item_id[:80]!r}.", param=param)
    return item


def access_item_page(
    caller: Caller, conversation_id: str, *, limit: int, after: str | None, newest_first: bool
) -> tuple[list[ConversationItem], bool]:
    """Items after the one with the id `after`, and whether more follow. Raises `NotFound`."""
    row = access_item_conversation(caller, conversation_id)
    rows: QuerySet[ConversationItem] = row.items.order_by("-pk" if newest_first else "pk")
    if after:
        cursor = _item(row, after, "after")
        rows = rows.filter(pk__lt=cursor.pk) if newest_first else rows.filter(pk__gt=cursor.pk)
    items = list(rows[: limit + 1])
    return items[:limit], len(items) > limit


def access_all_items(
    caller: Caller, conversation_id: str, until: int | None = None
) -> list[ConversationItem]:
    """All items, oldest first, up to the one with the key `until`.

    Raises: `NotFound`; `InvalidRequest` if they are too large to be read.
    """
    row = access_item_conversation(caller, conversation_id, "conversation")
    if row.size > MAX_CONVERSATION_CHARS:
        raise InvalidRequest(
            f"A conversation may hold at most {MAX_CONVERSATION_CHARS} characters.",
            param="conversation",
        )
    rows = row.items.order_by("pk")
    if until is not None:
        rows = rows.filter(pk__lte=until)
    return list(rows[: MAX_ITEMS + 1])


__all__ = [
    "MAX_ITEMS",
    "MESSAGES",
    "Batch",
    "BatchStatus",
    "ConversationItem",
    "ItemConversation",
    "ResponseStatus",
    "StoredCompletion",
    "StoredFile",
    "StoredResponse",
    "StoredUpload",
    "UploadPart",
    "access_all_items",
    "access_batch",
    "access_batches",
    "access_completion",
    "access_completions",
    "access_file",
    "access_files",
    "access_item",
    "access_item_conversation",
    "access_item_page",
    "access_response",
    "access_response_chain",
    "access_upload",
    "blob_url",
    "claimable_batches",
    "lease_is_free",
    "open_batches",
    "open_blob",
    "open_responses",
    "page",
    "stored_bytes",
    "unclaimed_responses",
]
