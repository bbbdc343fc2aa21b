"""A tenant's stored data, by kind, and its export as a streamed ZIP archive."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import Model, QuerySet
from django.utils import timezone

from common.db import iterate_by_key
from tenants.models import ApiKey, AuditEntry, Invitation, Membership, ServiceAccount, Tenant

# Each app that stores data of tenants registers its kinds when it starts (`register_data_kind`),
# for export, erasure and retention. A test checks that every model with a tenant is covered.

#: Rows deleted per transaction, few enough that other writers don't wait long for it.
DELETE_BATCH = 2000


@dataclass(frozen=True)
class TenantDataKind:
    """One kind of a tenant's data.

    Attributes:
        name: of its file in an export.
        rows: query of a tenant's rows.
        model: of the rows. None: an export doesn't include this kind.
        secret: fields that an export omits.
        erase: removes a tenant's data and returns how many; may be called again. None: the data
            stay, like the audit log.
        files: names and paths of the files that belong to it.
    """

    name: str
    rows: Callable[[Tenant], QuerySet[Any]] | None = None
    model: type[Model] | None = None
    secret: tuple[str, ...] = ()
    erase: Callable[[Tenant], int] | None = None
    files: Callable[[Tenant], Iterator[tuple[str, Path]]] | None = None


_holdings: dict[str, TenantDataKind] = {}


def register_data_kind(holding: TenantDataKind) -> None:
    """Add a kind, replacing one of the same name."""
    _holdings[holding.name] = holding


def data_kinds() -> list[TenantDataKind]:
    """All kinds in the order of registration: rows that refer to others come first."""
    return list(_holdings.values())


def simple_kind(
    name: str, model: type[Model], *, secret: tuple[str, ...] = (), stays: bool = False
) -> TenantDataKind:
    """The common kind: rows with a `tenant` field."""

    def rows(tenant: Tenant) -> QuerySet[Any]:
        return model._default_manager.filter(tenant=tenant)

    def erase(tenant: Tenant) -> int:
        return delete_in_batches(rows(tenant))

    return TenantDataKind(name, rows, model, secret, None if stays else erase)


def delete_in_batches(rows: QuerySet[Any]) -> int:
    """Delete rows, `DELETE_BATCH` at a time; returns how many."""
    removed = 0
    while keys := list(rows.order_by("pk").values_list("pk", flat=True)[:DELETE_BATCH]):
        rows.model._default_manager.filter(pk__in=keys).delete()
        removed += len(keys)
    return removed


#: Size of a chunk: bytes of a file, rows of a query.
CHUNK_BYTES, CHUNK_ROWS = 1 << 16, 500
README = """What Quire keeps of a tenant. Each .jsonl file has one object a line; files/ has the
bytes of files under their ids. Secrets (of keys, invitations, the webhook) are left out.
"""


class _Sink(io.RawIOBase):
    """A file object that buffers the archive's bytes until they are read."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def pop_bytes(self) -> bytes:
        """Return the bytes since the last call."""
        data, self._parts = b"".join(self._parts), []
        return data


def export_chunks(tenant: Tenant) -> Iterator[bytes]:
    """The archive in chunks. May block."""
    sink = _Sink()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_entry("README.txt"), README)
        archive.writestr(_entry("tenant.json"), _json(_row_to_dict(tenant, ("salt",))))
        for holding in data_kinds():
            yield from _rows(archive, sink, tenant, holding)
            yield from _files(archive, sink, tenant, holding)
    yield sink.pop_bytes()


def _rows(
    archive: zipfile.ZipFile, sink: _Sink, tenant: Tenant, holding: TenantDataKind
) -> Iterator[bytes]:
    if holding.rows is None:
        return
    with archive.open(_entry(f"{holding.name}.jsonl"), "w", force_zip64=True) as file:
        rows = iterate_by_key(holding.rows(tenant))
        for number, row in enumerate(rows, start=1):
            file.write(_json(_row_to_dict(row, holding.secret)).encode() + b"\n")
            if number % CHUNK_ROWS == 0:
                yield sink.pop_bytes()


def _files(
    archive: zipfile.ZipFile, sink: _Sink, tenant: Tenant, holding: TenantDataKind
) -> Iterator[bytes]:
    if holding.files is None:
        return
    for name, path in holding.files(tenant):
        try:
            source = path.open("rb")
        except FileNotFoundError:  # removed while the archive was being written
            continue
        with source, archive.open(_entry(f"files/{name}"), "w", force_zip64=True) as file:
            while chunk := source.read(CHUNK_BYTES):
                file.write(chunk)
                yield sink.pop_bytes()


def _entry(name: str, moment: datetime | None = None) -> zipfile.ZipInfo:
    when = (moment or timezone.now()).timetuple()[:6]
    entry = zipfile.ZipInfo(name, when)
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def _row_to_dict(row: Model, secret: tuple[str, ...]) -> dict[str, Any]:
    fields = [field for field in row._meta.concrete_fields if field.name not in secret]
    return {field.attname: getattr(row, field.attname) for field in fields}


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, cls=DjangoJSONEncoder, ensure_ascii=False)


def export_file(tenant: Tenant, path: Path) -> int:
    """Write the archive into a new file; returns its size. Raises OSError."""
    size = 0
    with path.open("xb") as file:
        path.chmod(0o600)
        for chunk in export_chunks(tenant):
            size += file.write(chunk)
    return size


def _delete_keys(tenant: Tenant) -> int:
    """Clear the references between rotated keys first: they protect the earlier key."""
    keys = ApiKey.objects.filter(tenant=tenant)
    keys.update(first=None)
    return delete_in_batches(keys)


def register_data_kinds() -> None:
    """Delete keys before the accounts that hold them."""
    register_data_kind(
        TenantDataKind(
            "keys",
            lambda tenant: ApiKey.objects.filter(tenant=tenant),
            ApiKey,
            secret=("digest",),
            erase=_delete_keys,
        )
    )
    register_data_kind(simple_kind("service-accounts", ServiceAccount))
    register_data_kind(simple_kind("invitations", Invitation, secret=("digest",)))
    register_data_kind(simple_kind("members", Membership))
    register_data_kind(simple_kind("audit-log", AuditEntry, stays=True))
