"""Sweeps over many rows and files: a query for each page of them, never one for each."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from allauth.usersessions.models import UserSession
from django.contrib.sessions.models import Session
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.tasks import clear_sessions
from adapters import store
from adapters.actions import referenced_digests
from adapters.models import AdapterVersion
from metering import webhooks
from metering.models import Webhook
from storage import actions
from storage.blobs import blob_path
from storage.models import StoredFile, StoredUpload, UploadPart
from tenants import audit_retention
from tenants.models import AuditEntry, Tenant
from tests.platform.adapters import added, served
from tests.platform.conftest import World
from tests.platform.test_audit_retention import rows

pytestmark = pytest.mark.django_db

PAST = timedelta(days=1)
HOUR_AGO = 2 * actions.files.ORPHAN_AFTER_S


@pytest.fixture(autouse=True)
def _files_dir(adapter_store: Path, tmp_path: Path, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(storage_dir=tmp_path)


def write_blob(tenant: Tenant, public_id: str) -> Path:
    path = blob_path(tenant.pk, public_id)
    path.touch()
    moment = path.stat().st_mtime - HOUR_AGO
    os.utime(path, (moment, moment))
    return path


def stored_files(world: World, count: int, **columns: Any) -> list[Path]:
    StoredFile.objects.bulk_create(
        [
            StoredFile(
                public_id=f"file_{number:032x}", tenant=world.acme, filename="f", purpose="batch",
                size=0, **columns,
            )
            for number in range(count)
        ],
        batch_size=500,
    )  # fmt: skip
    return [write_blob(world.acme, f"file_{number:032x}") for number in range(count)]


def expired_files(world: World, count: int) -> Callable[[], None]:
    paths = stored_files(world, count, expires_at=timezone.now() - PAST)

    def check() -> None:
        assert actions.remove_expired() == count
        assert not any(path.exists() for path in paths)

    return check


def files_kept_too_long(world: World, count: int) -> Callable[[], None]:
    paths = stored_files(world, count)
    StoredFile.objects.update(created_at=timezone.now() - 2 * PAST)
    Tenant.objects.filter(pk=world.acme.pk).update(keep_content_days=1)

    def check() -> None:
        assert actions.remove_expired() == count
        assert not any(path.exists() for path in paths)

    return check


def orphans_among_files(world: World, count: int) -> Callable[[], None]:
    used = stored_files(world, count // 2)
    orphans = [
        write_blob(world.acme, f"part_{number:032x}") for number in range(count - count // 2)
    ]

    def check() -> None:
        assert actions.remove_expired() == len(orphans)
        assert all(path.exists() for path in used)
        assert not any(path.exists() for path in orphans)

    return check


def expired_uploads(world: World, count: int) -> Callable[[], None]:
    uploads = StoredUpload.objects.bulk_create(
        [
            StoredUpload(
                public_id=f"upload_{number:032x}", tenant=world.acme, filename="f", purpose="batch",
                mime_type="text/plain", size=1, expires_at=timezone.now() - PAST,
            )
            for number in range(count)
        ],
        batch_size=500,
    )  # fmt: skip
    UploadPart.objects.bulk_create(
        [UploadPart(upload=row, public_id=f"part_{row.pk:032x}", size=1) for row in uploads],
        batch_size=500,
    )
    paths = [write_blob(world.acme, f"part_{row.pk:032x}") for row in uploads]

    def check() -> None:
        assert actions.remove_ended_uploads() == count
        assert not any(path.exists() for path in paths)
        assert not UploadPart.objects.exists()

    return check


def orphans_among_adapters(world: World, count: int) -> Callable[[], None]:
    adapter = added(world.owner, world.acme, served()).adapter
    used, orphans = (
        [f"{number + start:064x}" for number in range(count // 2)] for start in (0, count)
    )
    AdapterVersion.objects.bulk_create(
        [
            AdapterVersion(adapter=adapter, number=number + 2, digest=digest, source="upload")
            for number, digest in enumerate(used)
        ],
        batch_size=500,
    )
    for digest in (*used, *orphans):
        (store.adapters_dir() / digest).mkdir()

    def check() -> None:
        assert store.delete_orphans(referenced_digests, -1) == len(orphans)
        assert all((store.adapters_dir() / digest).exists() for digest in used)

    return check


def expired_sessions(world: World, count: int) -> Callable[[], None]:
    now = timezone.now()
    for expire_date, start in ((now - PAST, 0), (now + PAST, count)):
        Session.objects.bulk_create(
            [
                Session(session_key=str(start + number), session_data="", expire_date=expire_date)
                for number in range(count)
            ],
            batch_size=500,
        )
    UserSession.objects.bulk_create(
        [
            UserSession(user=world.owner, session_key=str(number), ip="::1", user_agent="")
            for number in range(2 * count)
        ],
        batch_size=500,
    )

    def check() -> None:
        clear_sessions()
        assert Session.objects.count() == UserSession.objects.count() == count
        assert not Session.objects.filter(expire_date__lt=now).exists()

    return check


def tenants(count: int) -> list[Tenant]:
    return Tenant.objects.bulk_create(
        [Tenant(name=f"T{number}", slug=f"t{number}") for number in range(count)], batch_size=500
    )


def old_audit_rows(world: World, count: int) -> Callable[[], None]:
    tenants(count)
    rows(world, count, "file.create", days=audit_retention.ROUTINE_DAYS + 1)

    def check() -> None:
        assert audit_retention.remove_old() == count
        assert not AuditEntry.objects.filter(action="file.create").exists()

    return check


def webhook_logs(world: World, count: int) -> Callable[[], None]:
    Webhook.objects.bulk_create(
        [Webhook(tenant=tenant, url="https://example.org") for tenant in tenants(count)],
        batch_size=500,
    )

    def check() -> None:
        assert webhooks.forget_old() == 0

    return check


@pytest.mark.parametrize("count", [1200, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "prepare",
    [
        expired_files,
        files_kept_too_long,
        orphans_among_files,
        expired_uploads,
        orphans_among_adapters,
        expired_sessions,
        old_audit_rows,
        webhook_logs,
    ],
)
def test_fault_77_a_sweep_takes_a_page_of_rows_with_a_query(
    world: World, prepare: Callable[[World, int], Callable[[], None]], count: int
) -> None:
    check = prepare(world, count)
    with CaptureQueriesContext(connection) as queries:
        check()
    assert len(queries) <= 30 + count // 25
