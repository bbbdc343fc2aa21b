"""Writing conversations of the playground and of the API."""

from __future__ import annotations

import re
from typing import Any

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from common.errors import Conflict, PermissionDenied
from common.files import new_id
from engine.contract.errors import InvalidRequest
from storage.access import MAX_ITEMS, access_item, access_item_conversation, access_own_conversation
from storage.models import (
    MAX_FOLDER_CHARS,
    MAX_TITLE_CHARS,
    ConversationItem,
    ItemConversation,
    SavedConversation,
    json_chars,
)
from storage.ownership import (
    actor_of,
    add_stored_chars,
    check_storage_quota,
    default_expiry,
    ownership_fields,
)
from storage.playground_document import search_text, single_line, title_of, validate_document
from tenants.access import access_role
from tenants.actors import to_actor
from tenants.audit import log_action
from tenants.authentication import Caller
from tenants.models import Tenant, User

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@transaction.atomic
def create_item_conversation(
    *, caller: Caller, metadata: dict[str, str], items: list[dict[str, Any]]
) -> ItemConversation:
    """Create a conversation with these items. Raises `StorageFull`, `InvalidRequest`."""
    check_storage_quota(caller.tenant_id)
    row = ItemConversation.objects.create(
        public_id=new_id("conv_"),
        metadata=metadata,
        changed_at=timezone.now(),
        expires_at=default_expiry(),
        **ownership_fields(caller),
    )
    _append(row, items)
    log_action(actor_of(caller), "item_conversation.create", row, tenant=row.tenant)
    return row


@transaction.atomic
def update_item_conversation(
    *, caller: Caller, public_id: str, metadata: dict[str, str]
) -> ItemConversation:
    """Change its metadata. Raises `NotFound`."""
    row = access_item_conversation(caller, public_id)
    row.metadata = metadata
    row.save(update_fields=["metadata"])
    log_action(actor_of(caller), "item_conversation.update", row, tenant=row.tenant)
    return row


@transaction.atomic
def delete_item_conversation(*, caller: Caller, public_id: str) -> None:
    """Delete it and its items. Raises `NotFound`."""
    row = access_item_conversation(caller, public_id)
    log_action(actor_of(caller), "item_conversation.delete", row, tenant=row.tenant)
    row.delete()


@transaction.atomic
def add_items(
    *, caller: Caller, public_id: str, items: list[dict[str, Any]]
) -> list[ConversationItem]:
    """Append items; they keep the ids that they come with, if these are free.

    No audit row: every turn of every conversation adds items, which have their own times.

    Raises: `NotFound`, `StorageFull`, `InvalidRequest` for more than a conversation holds.
    """
    check_storage_quota(caller.tenant_id)
    return _append(access_item_conversation(caller, public_id), items)


@transaction.atomic
def append_response_turn(
    *,
    tenant_id: int,
    conversation_id: str,
    read: list[dict[str, Any]],
    written: list[dict[str, Any]],
) -> None:
    """Append a response's input and output, once: another gateway may have done so already.

    A deleted or full conversation stays unchanged: the response was sent already, and the next
    request gets the error.
    """
    rows = ItemConversation.objects.select_for_update()
    row = rows.filter(tenant_id=tenant_id, public_id=conversation_id).first()
    if row is None or row.items.count() + len(read) + len(written) > MAX_ITEMS:
        return
    names = [name for item in written if (name := _client_item_id(item))]
    if not row.items.filter(public_id__in=names).exists():
        _append(row, [*read, *written])


def _append(row: ItemConversation, items: list[dict[str, Any]]) -> list[ConversationItem]:
    row = ItemConversation.objects.select_for_update().get(pk=row.pk)
    if row.items.count() + len(items) > MAX_ITEMS:
        raise InvalidRequest(
            f"A conversation may hold at most {MAX_ITEMS} items.",
            param="items",
            code="conversation_too_long",
        )
    client_ids = [name for item in items if (name := _client_item_id(item))]
    existing = row.items.filter(public_id__in=client_ids)
    used_ids = set(existing.values_list("public_id", flat=True))
    new_rows = []
    for item in items:
        name = _client_item_id(item)
        if name is None or name in used_ids:
            name = new_id("item_")
        used_ids.add(name)
        stored_item = {**item, "id": name}
        new_rows.append(
            ConversationItem(
                conversation=row, public_id=name, item=stored_item, size=json_chars(stored_item)
            )
        )
    new_rows = ConversationItem.objects.bulk_create(new_rows)
    size = sum(new_row.size for new_row in new_rows)
    row.changed_at, row.expires_at = timezone.now(), default_expiry()
    row.save(update_fields=["changed_at", "expires_at"])
    ItemConversation.objects.filter(pk=row.pk).update(size=F("size") + size)
    add_stored_chars(row.tenant_id, size)
    return new_rows


def _client_item_id(item: dict[str, Any]) -> str | None:
    """The id that an item comes with, if it is valid and free."""
    name = item.get("id")
    return name if isinstance(name, str) and _NAME.fullmatch(name) else None


@transaction.atomic
def delete_item(*, caller: Caller, conversation_id: str, item_id: str) -> ItemConversation:
    """Delete one item; returns its conversation. Raises `NotFound`."""
    item = access_item(caller, conversation_id, item_id)
    rows = ItemConversation.objects.filter(pk=item.conversation_id)
    rows.update(size=F("size") - item.size)
    item.delete()
    row = rows.get()
    log_action(
        actor_of(caller), "item_conversation.delete_item", row, tenant=row.tenant, item=item_id
    )
    return row


@transaction.atomic
def create_conversation(*, actor: User, tenant: Tenant, document: Any) -> SavedConversation:
    """Create a conversation, titled with its first words.

    Raises: `NotFound` for others' tenants, `PermissionDenied` if the tenant stores none,
    `InvalidRequest`, `StorageFull`.
    """
    access_role(actor, tenant)
    _check_conversations_enabled(tenant)
    check_storage_quota(tenant.pk)
    checked = validate_document(document)
    row = SavedConversation(
        public_id=new_id("talk-"), tenant=tenant, user=actor, title=title_of(checked)
    )
    _write(row, checked)
    log_action(to_actor(actor), "conversation.create", row, tenant=tenant)
    return row


@transaction.atomic
def update_conversation(
    *, actor: User, public_id: str, document: Any, version: int
) -> SavedConversation:
    """Save a changed conversation.

    Args:
        version: the version that was edited; another tab may have saved a newer one.
    Raises: `NotFound`, `PermissionDenied`, `Conflict`, `InvalidRequest`, `StorageFull`.
    """
    row = _get_own_conversation(actor, public_id)
    _check_conversations_enabled(row.tenant)
    if row.version != version:
        raise Conflict(
            "This conversation was changed elsewhere. Open it again to go on from there.",
            param="version",
        )
    check_storage_quota(row.tenant_id)
    row.version += 1
    _write(row, validate_document(document))
    return row


@transaction.atomic
def rename_conversation(*, actor: User, public_id: str, title: str) -> SavedConversation:
    """Rename it. Raises `NotFound`, `InvalidRequest`."""
    row = _get_own_conversation(actor, public_id)
    name = single_line(title)
    if not 0 < len(name) <= MAX_TITLE_CHARS:
        raise InvalidRequest(f"A title has 1 to {MAX_TITLE_CHARS} characters.", param="title")
    row.title, row.words = name, search_text(name, row.document)
    row.save(update_fields=["title", "words"])
    return row


@transaction.atomic
def move_conversation(*, actor: User, public_id: str, folder: str) -> SavedConversation:
    """Move it to a folder of its owner; "" for none. Raises `NotFound`, `InvalidRequest`."""
    row = _get_own_conversation(actor, public_id)
    row.folder = single_line(folder)
    if len(row.folder) > MAX_FOLDER_CHARS:
        raise InvalidRequest(
            f"folder must have at most {MAX_FOLDER_CHARS} characters.", param="folder"
        )
    row.save(update_fields=["folder"])
    return row


@transaction.atomic
def share_conversation(*, actor: User, public_id: str, shared: bool) -> SavedConversation:
    """Share it with members of the tenant who have its link, or unshare it. Raises `NotFound`."""
    row = _get_own_conversation(actor, public_id)
    if bool(row.shared_at) != shared:
        row.shared_at = timezone.now() if shared else None
        row.save(update_fields=["shared_at"])
        verb = "conversation.share" if shared else "conversation.unshare"
        log_action(to_actor(actor), verb, row, tenant=row.tenant)
    return row


@transaction.atomic
def delete_conversation(*, actor: User, public_id: str) -> None:
    """Delete a conversation. Raises `NotFound`."""
    row = _get_own_conversation(actor, public_id)
    log_action(to_actor(actor), "conversation.delete", row, tenant=row.tenant)
    row.delete()


def _get_own_conversation(actor: User, public_id: str) -> SavedConversation:
    conversation = access_own_conversation(actor, public_id)
    rows = SavedConversation.objects.select_for_update(of=("self",)).select_related("tenant")
    return rows.get(pk=conversation.pk)


def _check_conversations_enabled(tenant: Tenant) -> None:
    if not tenant.keep_conversations:
        raise PermissionDenied(
            f"{tenant.name} keeps no conversations on the server.", code="conversations_off"
        )


def _write(row: SavedConversation, document: dict[str, Any]) -> None:
    row.document, row.words = document, search_text(row.title, document)
    size = json_chars(document) + len(row.words)
    add_stored_chars(row.tenant_id, size - row.size)
    row.size, row.changed_at, row.expires_at = size, timezone.now(), default_expiry()
    row.save()
