"""What storage keeps of tenants."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from django.db.models import QuerySet

from storage.blobs import blob_path, tenant_dir
from storage.models import (
    Batch,
    ConversationItem,
    ItemConversation,
    SavedConversation,
    StoredCompletion,
    StoredFile,
    StoredResponse,
    StoredUpload,
    UploadPart,
)
from tenants.models import Tenant
from tenants.tenant_data import Holding, of_tenant, register, remove_in_parts


def register_all() -> None:
    """Batches before the files that they name; items go with their conversations, parts with their
    uploads.
    """
    register(of_tenant("batches", Batch))
    register(of_tenant("responses", StoredResponse))
    register(of_tenant("chat-completions", StoredCompletion))
    register(of_tenant("conversations", SavedConversation))
    register(of_tenant("item-conversations", ItemConversation))
    register(Holding("conversation-items", _items, ConversationItem))
    register(of_tenant("uploads", StoredUpload))
    register(Holding("upload-parts", _parts, UploadPart, files=_part_bytes))
    register(Holding("files", _rows, StoredFile, erase=_erase, files=_bytes))


def _items(tenant: Tenant) -> QuerySet[ConversationItem]:
    return ConversationItem.objects.filter(conversation__tenant=tenant)


def _parts(tenant: Tenant) -> QuerySet[UploadPart]:
    return UploadPart.objects.filter(upload__tenant=tenant)


def _part_bytes(tenant: Tenant) -> Iterator[tuple[str, Path]]:
    for public_id in _parts(tenant).values_list("public_id", flat=True).iterator():
        yield public_id, blob_path(tenant.pk, public_id)


def _rows(tenant: Tenant) -> QuerySet[StoredFile]:
    return StoredFile.objects.filter(tenant=tenant)


def _bytes(tenant: Tenant) -> Iterator[tuple[str, Path]]:
    for public_id in _rows(tenant).values_list("public_id", flat=True).iterator():
        yield public_id, blob_path(tenant.pk, public_id)


def _erase(tenant: Tenant) -> int:
    """Rows first: bytes without a row are nobody's, and a sweep would find them."""
    removed = remove_in_parts(_rows(tenant))
    shutil.rmtree(tenant_dir(tenant.pk), ignore_errors=True)
    return removed
