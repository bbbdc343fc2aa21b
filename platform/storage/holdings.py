"""What storage keeps of tenants."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from django.db.models import QuerySet

from storage.blobs import blob_path, tenant_dir
from storage.models import Batch, SavedConversation, StoredCompletion, StoredFile, StoredResponse
from tenants.holdings import Holding, of_tenant, register, remove_in_parts
from tenants.models import Tenant


def register_all() -> None:
    """Batches before the files that they name."""
    register(of_tenant("batches", Batch))
    register(of_tenant("responses", StoredResponse))
    register(of_tenant("chat-completions", StoredCompletion))
    register(of_tenant("conversations", SavedConversation))
    register(Holding("files", _rows, StoredFile, erase=_erase, files=_bytes))


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
