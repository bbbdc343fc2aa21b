"""Keeping conversations of the playground. Each is one person's; the tenant may switch it off."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.utils import timezone

from engine.contract.errors import InvalidRequest
from storage.access_conversations import access_own_conversation
from storage.actions.owners import kept_until
from storage.conversations import checked, searchable, title_of
from storage.errors import Conflict
from storage.ids import new_id
from storage.models import SavedConversation
from storage.models.conversation import MAX_TITLE_CHARS
from storage.models.json_text import json_chars
from storage.room import check_answers, note_answer
from tenants.access import access_role
from tenants.actors import as_actor
from tenants.audit import record
from tenants.errors import PermissionDenied
from tenants.models import Tenant, User


@transaction.atomic
def create_conversation(*, actor: User, tenant: Tenant, document: Any) -> SavedConversation:
    """Begin to keep one, named for its first words.

    Raises: `NotFound` for another's tenant, `PermissionDenied` where the tenant keeps none,
    `InvalidRequest`, `StorageFull`.
    """
    access_role(actor, tenant)
    _check_kept(tenant)
    check_answers(tenant.pk)
    found = checked(document)
    row = SavedConversation(
        public_id=new_id("talk-"), tenant=tenant, user=actor, title=title_of(found)
    )
    _write(row, found)
    record(actor=as_actor(actor), action="conversation.create", target=row, tenant=tenant)
    return row


@transaction.atomic
def update_conversation(
    *, actor: User, public_id: str, document: Any, version: int
) -> SavedConversation:
    """Write what it has become.

    Args:
        version: the one that was changed; another tab may have been faster.
    Raises: `NotFound`, `PermissionDenied`, `Conflict`, `InvalidRequest`, `StorageFull`.
    """
    row = _own(actor, public_id)
    _check_kept(row.tenant)
    if row.version != version:
        raise Conflict(
            "This conversation was changed elsewhere. Open it again to go on from there.",
            param="version",
        )
    check_answers(row.tenant_id)
    row.version += 1
    _write(row, checked(document))
    return row


@transaction.atomic
def rename_conversation(*, actor: User, public_id: str, title: str) -> SavedConversation:
    """Give it another name. Raises `NotFound`, `InvalidRequest`."""
    row = _own(actor, public_id)
    name = " ".join("".join(c if c.isprintable() else " " for c in title).split())
    if not 0 < len(name) <= MAX_TITLE_CHARS:
        raise InvalidRequest(f"A title has 1 to {MAX_TITLE_CHARS} characters.", param="title")
    row.title, row.words = name, searchable(name, row.document)
    row.save(update_fields=["title", "words"])
    return row


@transaction.atomic
def share_conversation(*, actor: User, public_id: str, shared: bool) -> SavedConversation:
    """Have the tenant's people read it who know its address, or no longer. Raises `NotFound`."""
    row = _own(actor, public_id)
    if bool(row.shared_at) != shared:
        row.shared_at = timezone.now() if shared else None
        row.save(update_fields=["shared_at"])
        verb = "conversation.share" if shared else "conversation.unshare"
        record(actor=as_actor(actor), action=verb, target=row, tenant=row.tenant)
    return row


@transaction.atomic
def delete_conversation(*, actor: User, public_id: str) -> None:
    """For good. Raises `NotFound`."""
    row = _own(actor, public_id)
    record(actor=as_actor(actor), action="conversation.delete", target=row, tenant=row.tenant)
    row.delete()


def _own(actor: User, public_id: str) -> SavedConversation:
    found = access_own_conversation(actor, public_id)
    rows = SavedConversation.objects.select_for_update(of=("self",)).select_related("tenant")
    return rows.get(pk=found.pk)


def _check_kept(tenant: Tenant) -> None:
    if not tenant.keep_conversations:
        raise PermissionDenied(
            f"{tenant.name} keeps no conversations on the server.", code="conversations_off"
        )


def _write(row: SavedConversation, document: dict[str, Any]) -> None:
    row.document, row.words = document, searchable(row.title, document)
    size = json_chars(document) + len(row.words)
    note_answer(row.tenant_id, size - row.size)
    row.size, row.changed_at, row.expires_at = size, timezone.now(), kept_until()
    row.save()
