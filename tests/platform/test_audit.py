"""Audit rows come with the operation or not at all, and stay."""

from unittest.mock import patch

import pytest
from django.db import DatabaseError, connection, transaction

from catalog import actions as catalog_actions
from catalog.models import ServedModel
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.audit import log_action
from tenants.models import ApiKey, AppendOnly, AuditEntry, Tenant
from tests.platform.conftest import World

database = pytest.mark.database


@database
@pytest.mark.django_db
def test_a_deed_whose_audit_row_fails_does_not_happen(world: World) -> None:
    keys, tenants = ApiKey.objects.count(), Tenant.objects.count()
    with patch.object(AuditEntry, "save", side_effect=DatabaseError("disk full")):
        with pytest.raises(DatabaseError):
            actions.create_key(actor=world.owner, tenant=world.acme)
        with pytest.raises(DatabaseError):
            actions.revoke_key(actor=world.owner, key=world.key)
        with pytest.raises(DatabaseError):
            actions.create_tenant(actor=SYSTEM_ACTOR, name="New")
        with pytest.raises(DatabaseError):
            catalog_actions.load_model(actor=SYSTEM_ACTOR, name="m", source="hub/model")
    assert (ApiKey.objects.count(), Tenant.objects.count()) == (keys, tenants)
    assert ApiKey.objects.get(pk=world.key.pk).state() == "active"
    assert not ServedModel.objects.exists()


@database
@pytest.mark.django_db
def test_an_audit_row_goes_with_a_deed_that_is_rolled_back(world: World) -> None:
    initial_audit_entry_count = AuditEntry.objects.count()

    def make_a_key_and_fail() -> None:
        with transaction.atomic():
            actions.create_key(actor=world.owner, tenant=world.acme)
            raise RuntimeError("later")

    with pytest.raises(RuntimeError, match="later"):
        make_a_key_and_fail()
    assert AuditEntry.objects.count() == initial_audit_entry_count


@pytest.mark.django_db(transaction=True)
def test_an_audit_row_outside_a_transaction_is_refused(world: World) -> None:
    with pytest.raises(RuntimeError, match="transaction"):
        log_action(actor=SYSTEM_ACTOR, action="x", target=world.acme)


@database
@pytest.mark.django_db
def test_secrets_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match="salt"):
        log_action(actor=SYSTEM_ACTOR, action="x", target=world.acme, salt=world.acme.salt)


@database
@pytest.mark.django_db
def test_rows_can_be_neither_changed_nor_deleted(world: World) -> None:
    entry = AuditEntry.objects.first()
    assert entry is not None
    entry.action = "forged"
    with pytest.raises(AppendOnly):
        entry.save()
    with pytest.raises(AppendOnly):
        entry.delete()
    with pytest.raises(AppendOnly):
        AuditEntry.objects.update(action="forged")
    with pytest.raises(AppendOnly):
        AuditEntry.objects.filter(pk=entry.pk).delete()
    with pytest.raises(AppendOnly):
        AuditEntry.objects.bulk_update([entry], ["action"])


@database
@pytest.mark.django_db
def test_a_row_keeps_its_actors_name_when_the_user_is_gone(world: World) -> None:
    actions.create_key(actor=world.admin, tenant=world.acme)
    pk = world.admin.pk
    world.admin.delete()
    entry = AuditEntry.objects.get(action="api_key.create", actor_label="admin")
    assert (entry.actor_id, entry.actor_kind) == (pk, "person")


@database
@pytest.mark.django_db
def test_a_signal_follows_the_commit_and_not_a_rollback(
    world: World, django_capture_on_commit_callbacks: object
) -> None:
    from tenants.signals import api_key_changed

    heard: list[ApiKey] = []

    def listen(key: ApiKey, **_: object) -> None:
        heard.append(key)

    api_key_changed.connect(listen)
    try:
        with django_capture_on_commit_callbacks(execute=True):  # type: ignore[operator]
            actions.revoke_key(actor=world.admin, key=world.key)
            assert heard == []
        assert heard == [world.key]
    finally:
        api_key_changed.disconnect(listen)


@database
@pytest.mark.django_db
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE tenants_auditentry SET actor_label = 'somebody else'",
        "DELETE FROM tenants_auditentry",
        "DELETE FROM tenants_auditentry WHERE id = (SELECT max(id) FROM tenants_auditentry)",
    ],
)
def test_the_database_itself_keeps_audit_rows_as_they_are(world: World, statement: str) -> None:
    initial = list(AuditEntry.objects.values())
    with (
        pytest.raises(DatabaseError, match="can neither be changed nor deleted"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute(statement)
    assert list(AuditEntry.objects.values()) == initial


@database
@pytest.mark.django_db
def test_the_guard_comes_back_when_a_table_was_rebuilt(world: World) -> None:
    from tenants.audit import drop_triggers_sql, guard_audit_log

    with connection.cursor() as cursor:
        for statement in drop_triggers_sql(
            connection.vendor
        ):  # as SQLite does when a column changes
            cursor.execute(statement)
    guard_audit_log("default")
    guard_audit_log("default")
    with pytest.raises(DatabaseError, match="neither"), transaction.atomic():
        AuditEntry.objects.get_queryset()._raw_delete("default")
