"""Keeping chat completions."""

from __future__ import annotations

from typing import Any

from storage.access import access_completion
from storage.actions.owners import kept_until, owner_fields
from storage.models import StoredCompletion
from storage.models.json_text import json_chars
from storage.room import note_answer
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
    """Keep a chat completion for as long as the installation keeps responses.

    One that is kept already stays as it is: its stream was written to the end twice.
    """
    kept = StoredCompletion.objects.filter(public_id=public_id, tenant_id=caller.tenant_id).first()
    if kept is not None:
        return kept
    size = json_chars(messages, body)
    note_answer(caller.tenant_id, size)
    return StoredCompletion.objects.create(
        size=size,
        public_id=public_id,
        model=model,
        messages=messages,
        metadata=metadata,
        body=body,
        expires_at=kept_until(),
        **owner_fields(caller),
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
    """Forget a completion. Raises `NotFound`."""
    access_completion(caller, public_id).delete()
