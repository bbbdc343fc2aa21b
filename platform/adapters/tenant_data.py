"""Tenants' data of this app. Unreferenced content is deleted an hour later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from django.db.models import QuerySet

from adapters.models import Adapter, AdapterAlias, AdapterUpload, AdapterVersion
from adapters.store import fetch_content
from tenants.models import Tenant
from tenants.tenant_data import TenantDataKind, register_data_kind, simple_kind


def register_data_kinds() -> None:
    """Register aliases before the versions that they protect; versions go with their adapters."""
    register_data_kind(simple_kind("adapter-uploads", AdapterUpload))
    register_data_kind(simple_kind("adapter-aliases", AdapterAlias))
    register_data_kind(
        TenantDataKind("adapter-versions", _versions, AdapterVersion, files=_content)
    )
    register_data_kind(simple_kind("adapters", Adapter))


def _versions(tenant: Tenant) -> QuerySet[AdapterVersion]:
    return AdapterVersion.objects.filter(adapter__tenant=tenant)


def _content(tenant: Tenant) -> Iterator[tuple[str, Path]]:
    digests = _versions(tenant).exclude(digest="").values_list("digest", flat=True)
    for digest in sorted(set(digests)):
        try:
            path = fetch_content(digest)
        except FileNotFoundError:
            continue
        files = [path] if path.is_file() else sorted(path.glob("*"))
        for file in files:
            yield f"adapters/{digest}/{file.name}", file
