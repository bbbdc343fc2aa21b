"""Storing responses and chat completions."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F

from common.errors import check_pending_limit
from engine.contract.errors import InvalidRequest
from storage.access import access_completion, access_response, open_responses
from storage.actions.conversations import append_response_turn
from storage.models import ResponseStatus, StoredCompletion, StoredResponse, json_chars
from storage.ownership import add_stored_chars, default_expiry, ownership_fields
from tenants.authentication import Caller


def store_completion(
    *,
    caller: Caller,
    public_id: str,
    model: str,
    messages: list[dict[str, Any]],
    metadata: dict[str, str],
    body: dict[str, Any],
) -> StoredCompletion:
    """Store a chat completion for the installation's retention of responses.

    An existing one stays unchanged: the end of its stream was recorded twice.
    """
    existing = StoredCompletion.objects.filter(
        public_id=public_id, tenant_id=caller.tenant_id
    ).first()
    if existing is not None:
        return existing
    size = json_chars(messages, body)
    add_stored_chars(caller.tenant_id, size)
    return StoredCompletion.objects.create(
        size=size,
        public_id=public_id,
        model=model,
        messages=messages,
        metadata=metadata,
        body=body,
        expires_at=default_expiry(),
        **ownership_fields(caller),
    )


def update_completion(
    *, caller: Caller, public_id: str, metadata: dict[str, str]
) -> StoredCompletion:
    """Change a completion's metadata. Raises `NotFound`."""
    row = access_completion(caller, public_id)
    row.metadata = metadata
    row.save(update_fields=["metadata"])
    return row


def delete_completion(*, caller: Caller, public_id: str) -> None:
    """Delete a completion. Raises `NotFound`."""
    access_completion(caller, public_id).delete()


#: Statuses that aren't final.
ACTIVE = (ResponseStatus.QUEUED, ResponseStatus.IN_PROGRESS)


@transaction.atomic
def store_response(
    *,
    caller: Caller,
    public_id: str,
    status: str,
    request: dict[str, Any],
    input_items: list[dict[str, Any]],
    body: dict[str, Any],
    previous_id: str = "",
    background: bool = False,
) -> StoredResponse:
    """Store a response for the installation's retention of responses.

    An existing one stays unchanged: the end of its stream was recorded twice.

    Raises: `TooManyPending` if the tenant has too many background responses.
    """
    if background:
        waiting = open_responses().filter(tenant_id=caller.tenant_id).count()
        max_open = settings.QUIRE.tenant_quotas.open_responses
        check_pending_limit(waiting, max_open, "background responses")
    existing = StoredResponse.objects.filter(
        public_id=public_id, tenant_id=caller.tenant_id
    ).first()
    if existing is not None:
        return existing
    size = json_chars(request, input_items, body)
    add_stored_chars(caller.tenant_id, size)
    _append_to_conversation(caller.tenant_id, status, request, input_items, body["output"])
    return StoredResponse.objects.create(
        size=size,
        public_id=public_id,
        status=status,
        background=background,
        request=request,
        input_items=input_items,
        body=body,
        previous_id=previous_id,
        expires_at=default_expiry(),
        **ownership_fields(caller),
    )


def _append_to_conversation(
    tenant_id: int,
    status: str,
    request: dict[str, Any],
    read: list[dict[str, Any]],
    written: list[dict[str, Any]],
) -> None:
    """Add a finished turn to the conversation that its request refers to."""
    named = request.get("conversation")
    name = named.get("id") if isinstance(named, dict) else named
    if name and status in (ResponseStatus.COMPLETED, ResponseStatus.INCOMPLETE):
        append_response_turn(tenant_id=tenant_id, conversation_id=name, read=read, written=written)


@transaction.atomic
def update_response(
    *, row: StoredResponse, status: str, body: dict[str, Any], owner: str | None = None
) -> bool:
    """Store the progress; False if the response has ended (was cancelled) or was deleted.

    Args:
        owner: the worker that writes; the result is also False if it has lost the lease.
    """
    rows = StoredResponse.objects.filter(pk=row.pk, status__in=ACTIVE)
    if owner is not None:
        rows = rows.filter(lease_owner=owner)
    changes: dict[str, Any] = {"status": status, "body": body}
    if status not in ACTIVE:
        changes["size"] = F("size") + json_chars(body)
    updated = bool(rows.update(**changes))
    if updated:
        _append_to_conversation(
            row.tenant_id, status, row.request, row.input_items, body.get("output", [])
        )
    return updated


@transaction.atomic
def cancel_response(*, caller: Caller, public_id: str) -> StoredResponse:
    """Cancel a background response. Cancelling a finished one changes nothing.

    Raises: `NotFound`; `InvalidRequest` for one that doesn't run in the background.
    """
    response = access_response(caller, public_id)
    if not response.background:
        raise InvalidRequest("Only a response made in the background can be cancelled.")
    row = StoredResponse.objects.select_for_update().get(pk=response.pk)
    if row.status in ACTIVE:
        body = {**row.body, "status": "cancelled"}
        # On SQLite, which locks no rows, a worker may have finished it just before.
        if update_response(row=row, status=ResponseStatus.CANCELLED, body=body):
            row.status, row.body = ResponseStatus.CANCELLED, body
        else:
            row.refresh_from_db()
    return row


def delete_response(*, caller: Caller, public_id: str) -> None:
    """Delete a response; it can't be continued any more. Raises `NotFound`."""
    access_response(caller, public_id).delete()
