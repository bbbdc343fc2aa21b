"""Kinds of tenant data of this app."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from django.db.models import QuerySet

from common.db import iterate_by_key
from storage.blobs import fetched_blob, remove_tenant_blobs
from storage.models import (
    Batch,
    ConversationItem,
    ItemConversation,
    PlaygroundPreset,
    SavedConversation,
    StoredCompletion,
    StoredFile,
    StoredResponse,
    StoredUpload,
    UploadPart,
)
from tenants.models import Tenant
from tenants.tenant_data import TenantDataKind, delete_in_batches, register_data_kind, simple_kind


def register_data_kinds() -> None:
    """Delete batches before the files that they refer to; items go with their conversations, parts
    with their uploads.
    """
    register_data_kind(simple_kind("batches", Batch))
    register_data_kind(simple_kind("responses", StoredResponse))
    register_data_kind(simple_kind("chat-completions", StoredCompletion))
    register_data_kind(simple_kind("conversations", SavedConversation))
    register_data_kind(simple_kind("presets", PlaygroundPreset))
    register_data_kind(simple_kind("item-conversations", ItemConversation))
    register_data_kind(TenantDataKind("conversation-items", _items, ConversationItem))
    register_data_kind(simple_kind("uploads", StoredUpload))
    register_data_kind(TenantDataKind("upload-parts", _parts, UploadPart, files=_part_bytes))
    register_data_kind(TenantDataKind("files", _rows, StoredFile, erase=_erase, files=_bytes))


def _items(tenant: Tenant) -> QuerySet[ConversationItem]:
    return ConversationItem.objects.filter(conversation__tenant=tenant)


def _parts(tenant: Tenant) -> QuerySet[UploadPart]:
    return UploadPart.objects.filter(upload__tenant=tenant)


def _part_bytes(tenant: Tenant) -> Iterator[tuple[str, Path]]:
    for part in iterate_by_key(_parts(tenant)):
        yield part.public_id, fetched_blob(tenant.pk, part.public_id)


def _rows(tenant: Tenant) -> QuerySet[StoredFile]:
    return StoredFile.objects.filter(tenant=tenant)


def _bytes(tenant: Tenant) -> Iterator[tuple[str, Path]]:
    for file in iterate_by_key(_rows(tenant)):
        yield file.public_id, fetched_blob(tenant.pk, file.public_id)


def _erase(tenant: Tenant) -> int:
    """Delete rows first: a sweep removes bytes without a row."""
    removed = delete_in_batches(_rows(tenant))
    remove_tenant_blobs(tenant.pk)
    return removed
