"""What this app keeps of tenants. Content that no version speaks of is swept an hour later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from django.db.models import QuerySet

from adapters.models import Adapter, AdapterAlias, AdapterUpload, AdapterVersion
from adapters.store import content_path
from tenants.models import Tenant
from tenants.tenant_data import Holding, of_tenant, register


def register_all() -> None:
    """Aliases before the versions that they protect; these go with their adapters."""
    register(of_tenant("adapter-uploads", AdapterUpload))
    register(of_tenant("adapter-aliases", AdapterAlias))
    register(Holding("adapter-versions", _versions, AdapterVersion, files=_content))
    register(of_tenant("adapters", Adapter))


def _versions(tenant: Tenant) -> QuerySet[AdapterVersion]:
    return AdapterVersion.objects.filter(adapter__tenant=tenant)


def _content(tenant: Tenant) -> Iterator[tuple[str, Path]]:
    digests = _versions(tenant).exclude(digest="").values_list("digest", flat=True)
    for digest in sorted(set(digests)):
        place = content_path(digest)
        files = [place] if place.is_file() else sorted(place.glob("*"))
        for file in files:
            yield f"adapters/{digest}/{file.name}", file
