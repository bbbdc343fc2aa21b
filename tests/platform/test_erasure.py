"""A tenant's data: taken along whole, kept for as long as was said, erased whole."""

from __future__ import annotations

import io
import json
import zipfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.management import CommandError, call_command
from django.utils import timezone

from adapters.models import Adapter, AdapterAlias, AdapterVersion
from catalog.models import ServedModel
from common.errors import Conflict, NotFound, PermissionDenied
from engine.contract.errors import InvalidRequest
from metering import actions as money
from metering.models import Budget, UsageDay, UsageEntry, UsageHour, Webhook, WebhookDelivery
from metering.retention import delete_expired_usage
from storage import actions as storage
from storage.blobs import blob_path, tenant_dir
from storage.models import StoredFile
from tenants import actions, tasks
from tenants.actors import SYSTEM_ACTOR, key_actor
from tenants.models import ApiKey, AuditEntry, Invitation, Membership, ServiceAccount, Tenant
from tenants.tenant_data import data_kinds, export_chunks
from tests.platform.conftest import World
from tests.platform.test_conversations import talk
from tests.platform.test_storage import caller_of
from tests.platform.test_usage_sums import used

pytestmark = [pytest.mark.django_db]
database = pytest.mark.database
#: Models with a tenant that no export holds, and why.
REVIEWED = {
    "catalog.mcpserver_tenants": "which tools it may use: the operator's, removed when erased",
    "catalog.servedmodel_tenants": "which models it may use: the operator's, removed when erased",
}


@pytest.fixture(autouse=True)
def _files_dir(tmp_path: Path, settings: Any, live_redis: str) -> None:
    settings.QUIRE = settings.QUIRE.replace(storage_dir=tmp_path)


def fill(world: World, tenant: Tenant, key: ApiKey) -> StoredFile:
    """Something of every kind."""
    used(tenant, timezone.now())
    actions.rotate_key(actor=SYSTEM_ACTOR, key=key)
    account = actions.create_service_account(actor=SYSTEM_ACTOR, tenant=tenant, name="robot")
    actions.create_key(actor=SYSTEM_ACTOR, tenant=tenant, service_account=account)
    actions.invite(actor=SYSTEM_ACTOR, tenant=tenant, email="ines@example.org")
    money.set_budget(actor=SYSTEM_ACTOR, tenant=tenant, key=key, period="day", tokens=5)
    member = Membership.objects.filter(tenant=tenant).first()
    person = member.user if member else world.operator
    storage.create_conversation(actor=person, tenant=tenant, document=talk("A secret of ours"))
    money.set_webhook(actor=SYSTEM_ACTOR, tenant=tenant, url="https://x.example/in")
    money.send_test_event(actor=SYSTEM_ACTOR, tenant=tenant)
    model = ServedModel.objects.get_or_create(name="m", source="hub/m")[0]
    model.tenants.add(tenant)
    adapter = Adapter.objects.create(tenant=tenant, served_model=model, name="tone")
    version = AdapterVersion.objects.create(adapter=adapter, number=1, digest="d" * 64)
    AdapterAlias.objects.create(
        adapter=adapter, tenant=tenant, served_model=model, name="tone", version=version
    )
    return storage.create_file(
        caller=caller_of(tenant), filename="a.txt", purpose="batch", size=5, chunks=[b"hello"]
    )


def with_a_tenant() -> set[str]:
    """Models that refer to a tenant, links between models among them."""
    return {
        model._meta.label_lower
        for model in apps.get_models(include_auto_created=True)
        if any(field.related_model is Tenant for field in model._meta.concrete_fields)
    }


def test_everything_with_a_tenant_is_in_its_export_or_was_looked_at() -> None:
    named = {data_kind.model._meta.label_lower for data_kind in data_kinds() if data_kind.model}
    assert with_a_tenant() - named == set(REVIEWED)


@database
def test_an_export_holds_everything_and_no_secret(world: World) -> None:
    file = fill(world, world.acme, world.key)
    fill(world, world.rival, world.rival_key)
    with zipfile.ZipFile(io.BytesIO(b"".join(export_chunks(world.acme)))) as archive:
        assert archive.testzip() is None
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert texts[f"files/{file.public_id}"] == "hello"
    assert json.loads(texts["tenant.json"])["slug"] == "acme"
    for kind in ("keys", "usage", "usage-days", "budgets", "webhook", "members", "audit-log"):
        rows = [json.loads(line) for line in texts[f"{kind}.jsonl"].splitlines()]
        assert rows, kind
        assert {row["tenant_id"] for row in rows} == {world.acme.pk}, kind
    full = "".join(texts.values())
    secrets = [*ApiKey.objects.values_list("digest", flat=True), world.acme.salt]
    secrets += [*Invitation.objects.values_list("digest", flat=True)]
    secrets += [*Webhook.objects.values_list("secret", flat=True)]
    assert [secret for secret in secrets if secret in full] == []


@database
def test_an_erased_tenant_leaves_the_audit_log_alone(world: World) -> None:
    fill(world, world.acme, world.key)
    other_row = fill(world, world.rival, world.rival_key)
    initial_audit_entry_count, name = AuditEntry.objects.count(), world.acme.cache_namespace
    epoch = world.member.session_epoch
    actions.erase_tenant(actor=world.owner, tenant=world.acme, confirm="acme")
    world.key.refresh_from_db()
    world.member.refresh_from_db()
    assert world.key.revoked_at is not None, "at once"
    assert world.member.session_epoch > epoch, "at once"
    tasks.erase(world.acme.pk)
    tasks.erase(world.acme.pk)
    gone = Tenant.objects.get(pk=world.acme.pk)
    assert (gone.slug, gone.name, gone.active) == (f"erased-{gone.pk}", "Erased", False)
    assert gone.cache_namespace != name
    for model in (ApiKey, ServiceAccount, Invitation, Membership, UsageEntry, UsageHour, UsageDay):
        assert not model.objects.filter(tenant=gone).exists(), model
        assert model.objects.filter(tenant=world.rival).exists(), model
    for model in (Budget, Webhook, WebhookDelivery, StoredFile, Adapter, AdapterAlias):
        assert not model.objects.filter(tenant=gone).exists(), model
    assert list(tenant_dir(gone.pk).iterdir()) == []
    assert blob_path(world.rival.pk, other_row.public_id).read_bytes() == b"hello"
    assert AuditEntry.objects.filter(tenant=gone).count() > 0
    assert AuditEntry.objects.count() > initial_audit_entry_count
    with pytest.raises(Conflict):
        actions.set_tenant_active(actor=SYSTEM_ACTOR, tenant=gone, active=True)


@database
def test_what_comes_in_late_is_erased_too_and_only_for_a_day(world: World) -> None:
    actions.erase_tenant(actor=SYSTEM_ACTOR, tenant=world.acme, confirm="acme")
    tasks.erasures()  # the hint was lost
    assert Tenant.objects.get(pk=world.acme.pk).erased_at is not None
    used(world.acme, timezone.now())
    tasks.erasures()
    assert not UsageEntry.objects.filter(tenant=world.acme).exists()
    tasks.erase(world.rival.pk)
    assert ApiKey.objects.filter(tenant=world.rival).exists()


@pytest.mark.parametrize(
    ("who", "refused"),
    [
        ("owner", None),
        ("operator", None),
        ("admin", PermissionDenied),
        ("member", PermissionDenied),
        ("viewer", PermissionDenied),
        ("outsider", NotFound),
    ],
)
def test_owners_and_operators_alone_take_along_and_erase(
    world: World, who: str, refused: Any
) -> None:
    actor = world.user(who)
    if refused is None:
        actions.log_export(actor=actor, tenant=world.acme)
        with pytest.raises(InvalidRequest, match="short name"):
            actions.erase_tenant(actor=actor, tenant=world.acme, confirm="Acme")
        actions.erase_tenant(actor=actor, tenant=world.acme, confirm="acme")
        return
    with pytest.raises(refused):
        actions.log_export(actor=actor, tenant=world.acme)
    with pytest.raises(refused):
        actions.erase_tenant(actor=actor, tenant=world.acme, confirm="acme")


def test_an_owners_key_neither_takes_along_nor_erases(world: World) -> None:
    key = actions.create_key(actor=world.owner, tenant=world.acme, scopes=["tenant:admin"])
    with pytest.raises(PermissionDenied, match="Only an owner who is logged in"):
        actions.log_export(actor=key_actor(key.key), tenant=world.acme)


@database
def test_single_requests_go_after_their_days_and_sums_stay(world: World) -> None:
    now = timezone.now()
    for tenant in (world.acme, world.rival):
        for days in (1, 34, 36, 400):
            used(tenant, now - timedelta(days=days))
    sums = UsageDay.objects.count()
    actions.update_tenant(actor=SYSTEM_ACTOR, tenant=world.acme, keep_usage_days=35)
    assert delete_expired_usage() == 2
    assert UsageEntry.objects.filter(tenant=world.acme).count() == 2
    assert UsageEntry.objects.filter(tenant=world.rival).count() == 4
    assert UsageDay.objects.count() == sums
    with pytest.raises(InvalidRequest) as caught:
        actions.update_tenant(actor=SYSTEM_ACTOR, tenant=world.acme, keep_usage_days=7)
    assert caught.value.param == "keep_usage_days"


@database
def test_content_goes_after_the_days_that_its_owners_chose(world: World) -> None:
    old, new = (fill(world, world.acme, world.key), None)
    StoredFile.objects.filter(pk=old.pk).update(created_at=timezone.now() - timedelta(days=8))
    new = storage.create_file(
        caller=caller_of(world.acme), filename="b", purpose="batch", size=1, chunks=[b"b"]
    )
    for who, refused in ((world.admin, PermissionDenied), (world.outsider, NotFound)):
        with pytest.raises(refused):
            actions.update_tenant(actor=who, tenant=world.acme, keep_content_days=7)
    storage.remove_expired()
    assert StoredFile.objects.count() == 2
    actions.update_tenant(actor=world.owner, tenant=world.acme, keep_content_days=7)
    storage.remove_expired()
    assert list(StoredFile.objects.all()) == [new]
    assert not blob_path(world.acme.pk, old.public_id).exists()


def test_the_commands_do_the_same(world: World, tmp_path: Path) -> None:
    fill(world, world.acme, world.key)
    archive_path = tmp_path / "acme.zip"
    call_command("export_tenant", "--tenant", "acme", str(archive_path))
    assert zipfile.is_zipfile(archive_path)
    assert archive_path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(CommandError, match="can't be written"):
        call_command("export_tenant", "--tenant", "acme", str(archive_path))
    with pytest.raises(CommandError, match="short name"):
        call_command("erase_tenant", "--tenant", "acme", "--confirm", "rival")
    out = io.StringIO()
    call_command("erase_tenant", "--tenant", "acme", "--confirm", "acme", stdout=out)
    assert "3 keys" in out.getvalue()
    assert not ApiKey.objects.filter(tenant=world.acme).exists()
