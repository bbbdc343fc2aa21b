"""The audit log is bounded by policy, and only its retention gets past the guard."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction
from django.utils import timezone

from metering import actions as metering_actions
from metering import webhooks
from metering.models import WebhookDelivery
from tenants import audit as audit_guard
from tenants import audit_retention
from tenants.models import AuditEntry, Tenant
from tests.platform.conftest import World

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def rows(world: World, count: int, action: str, days: float = 0, tenant: Any = None) -> None:
    """As if a key had done it so often, so many days ago."""
    audit_entries = [
        AuditEntry(
            actor_kind="key",
            actor_label="API key",
            actor_key=world.key,
            tenant=tenant or world.acme,
            action=action,
            target_type="storedfile",
            target_id=str(number),
            target_label="file",
        )
        for number in range(count)
    ]
    created_at = timezone.now() - timedelta(days=days)
    AuditEntry._meta.get_field("at").auto_now_add = False  # type: ignore[union-attr]
    try:
        for audit_entry in audit_entries:
            audit_entry.at = created_at
        AuditEntry.objects.bulk_create(audit_entries, batch_size=2000)
    finally:
        AuditEntry._meta.get_field("at").auto_now_add = True  # type: ignore[union-attr]


def count(action: str, tenant: Tenant) -> int:
    return AuditEntry.objects.filter(action=action, tenant=tenant).count()


def assert_guarded() -> None:
    for statement in (
        "DELETE FROM tenants_auditentry WHERE action = 'file.create'",
        "UPDATE tenants_auditentry SET action = 'forged'",
    ):
        with (
            pytest.raises(DatabaseError, match="neither be changed nor deleted"),
            transaction.atomic(),
            connection.cursor() as cursor,
        ):
            cursor.execute(statement)


def test_fault_72_a_day_in_a_loop_leaves_what_the_policy_allows(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_retention, "MAX_ROUTINE", 1000)
    monkeypatch.setattr(audit_retention, "PAGE", 500)
    rows(world, 6000, "file.create")
    rows(world, 6000, "file.delete")
    rows(world, 40, "file.create", tenant=world.rival)
    rows(world, 20, "api_key.create")
    initial_audit_entry_count = AuditEntry.objects.count()
    newest = list(
        AuditEntry.objects.filter(action__in=audit_retention.ROUTINE, tenant=world.acme)
        .order_by("-pk")
        .values_list("pk", flat=True)[:1000]
    )
    pages: list[int] = []
    allowed = audit_retention.deletions_allowed

    def page(using: str) -> Any:
        pages.append(AuditEntry.objects.count())
        return allowed(using)

    monkeypatch.setattr(audit_retention, "deletions_allowed", page)
    assert audit_retention.remove_old() == 11_000
    assert pages == list(range(initial_audit_entry_count, initial_audit_entry_count - 11_000, -500))
    remaining = AuditEntry.objects.filter(action__in=audit_retention.ROUTINE, tenant=world.acme)
    assert list(remaining.order_by("-pk").values_list("pk", flat=True)) == newest
    assert count("file.create", world.rival) == 40
    assert AuditEntry.objects.count() == initial_audit_entry_count - 11_000
    assert_guarded()


def test_fault_72_routine_goes_after_a_month_and_the_rest_when_the_operator_says(
    world: World, settings: Any
) -> None:
    rows(world, 30, "file.create", days=31)
    rows(world, 3, "file.create", days=29)
    rows(world, 4, "api_key.revoke", days=100)
    rows(world, 5, "api_key.revoke", days=731)
    settings.QUIRE = settings.QUIRE.replace(audit_days=0)
    assert audit_retention.remove_old() == 30
    assert count("file.create", world.acme) == 3
    assert count("api_key.revoke", world.acme) == 9
    settings.QUIRE = settings.QUIRE.replace(audit_days=730)
    assert audit_retention.remove_old() == 5
    assert count("api_key.revoke", world.acme) == 4
    assert audit_retention.remove_old() == 0
    assert_guarded()


def test_fault_72_a_page_that_fails_leaves_rows_and_guard(world: World) -> None:
    rows(world, 3, "file.create")

    def page() -> None:
        with audit_guard.deletions_allowed("default"):
            AuditEntry.objects.filter(action="file.create")._raw_delete("default")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        page()
    assert count("file.create", world.acme) == 3
    assert_guarded()
    with (
        audit_guard.deletions_allowed("default"),
        pytest.raises(DatabaseError, match="neither"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute("UPDATE tenants_auditentry SET action = 'forged'")
    assert_guarded()


def test_fault_72_the_log_of_webhooks_is_bounded_by_tenant(
    world: World, live_redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "MAX_LOGGED", 10)
    url = "https://x.example/in"
    for owner, tenant, number in ((world.admin, world.acme, 30), (world.outsider, world.rival, 5)):
        metering_actions.set_webhook(actor=owner, tenant=tenant, url=url)
        for _ in range(number):
            metering_actions.send_test_event(actor=owner, tenant=tenant)
    waiting = WebhookDelivery.objects.filter(tenant=world.acme).latest("pk")
    now = timezone.now()
    settled = WebhookDelivery.objects.exclude(pk=waiting.pk)
    settled.update(next_try_at=None, delivered_at=now)
    assert webhooks.forget_old() == 19
    assert WebhookDelivery.objects.filter(tenant=world.acme).count() == 11
    assert WebhookDelivery.objects.filter(tenant=world.rival).count() == 5
