"""Who may read what: a stranger's object is not found, for every access function."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from catalog.access import access_replicas, access_served_models
from catalog.models import Replica, ServedModel
from common.errors import NotFound, PermissionDenied
from metering.access import access_all_usage, access_usage, access_usage_entries
from metering.ledger import insert_records
from metering.usage_record import UsageRecord
from tenants import access
from tenants.models import Tenant, User
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db, pytest.mark.database]

#: Every function that reads a tenant's objects, and the lowest role that may.
READERS: dict[str, tuple[Callable[[User, Tenant], Any], str]] = {
    "tenant": (lambda user, tenant: access.access_tenant(user, tenant.slug), "viewer"),
    "role": (access.access_role, "viewer"),
    "members": (lambda user, tenant: list(access.access_members(user, tenant)), "viewer"),
    "member": (
        lambda user, tenant: access.access_member(user, tenant, tenant.memberships.first().pk),
        "viewer",
    ),
    "keys": (lambda user, tenant: list(access.access_keys(user, tenant)), "viewer"),
    "audit": (lambda user, tenant: list(access.access_audit(user, tenant)), "admin"),
    "usage": (access_usage, "viewer"),
    "usage entries": (lambda user, tenant: list(access_usage_entries(user, tenant)), "viewer"),
}
ORDER = ["viewer", "member", "admin", "owner", "operator"]


@pytest.mark.parametrize("name", READERS)
def test_an_outsider_finds_nothing(world: World, name: str) -> None:
    with pytest.raises(NotFound) as caught:
        READERS[name][0](world.outsider, world.acme)
    assert caught.value.status == 404


@pytest.mark.parametrize("name", READERS)
def test_roles_from_the_lowest_allowed_up_may_read(world: World, name: str) -> None:
    read, lowest = READERS[name]
    for role in ORDER:
        if ORDER.index(role) >= ORDER.index(lowest):
            read(world.user(role), world.acme)
        else:
            with pytest.raises(PermissionDenied):
                read(world.user(role), world.acme)


@pytest.mark.parametrize("name", READERS)
def test_a_disabled_member_finds_nothing(world: World, name: str) -> None:
    world.owner.is_active = False
    world.owner.save()
    with pytest.raises(NotFound):
        READERS[name][0](world.owner, world.acme)


def test_a_tenant_that_is_not_there_looks_like_a_strangers(world: World) -> None:
    messages = set()
    for slug in ("acme", "nobody"):
        with pytest.raises(NotFound) as caught:
            access.access_tenant(world.outsider, slug)
        messages.add(caught.value.message.replace(slug, "x"))
    assert len(messages) == 1


def test_users_list_their_own_tenants_and_operators_all(world: World) -> None:
    assert [t.slug for t in access.access_tenants(world.viewer)] == ["acme"]
    assert [t.slug for t in access.access_tenants(world.outsider)] == ["rival"]
    assert [t.slug for t in access.access_tenants(world.operator)] == ["acme", "rival"]


def test_members_see_keys_that_they_made_and_admins_all(world: World) -> None:
    assert list(access.access_keys(world.member, world.acme)) == [world.key]
    assert list(access.access_keys(world.viewer, world.acme)) == []
    assert list(access.access_keys(world.admin, world.acme)) == [world.key]


def test_a_key_is_found_in_its_own_tenant_alone(world: World) -> None:
    assert access.access_key(world.admin, world.acme, world.key.pk) == world.key
    with pytest.raises(NotFound):
        access.access_key(world.admin, world.acme, world.rival_key.pk)
    with pytest.raises(NotFound):
        access.access_key(world.viewer, world.acme, world.key.pk)


def test_a_member_of_another_tenant_is_not_found(world: World) -> None:
    strangers = world.rival.memberships.get()
    with pytest.raises(NotFound):
        access.access_member(world.owner, world.acme, strangers.pk)


def test_audit_rows_of_another_tenant_stay_hidden(world: World) -> None:
    tenants = {entry.tenant for entry in access.access_audit(world.owner, world.acme)}
    assert tenants == {world.acme}


def test_usage_of_another_tenant_stays_hidden(world: World) -> None:
    for number, tenant in enumerate([world.acme, world.rival]):
        record = UsageRecord(
            request_id=f"r{number}",
            tenant_id=tenant.pk,
            endpoint="chat",
            model="m",
            prompt_tokens=5,
            completion_tokens=7,
            status=200,
            started_at=datetime.now(UTC),
            duration_ms=1.0,
        )
        insert_records([record])
    assert [entry.request_id for entry in access_usage_entries(world.viewer, world.acme)] == ["r0"]
    (row,) = access_usage(world.viewer, world.acme)
    assert (row.requests, row.total_tokens, row.tenant) == (1, 12, "acme")
    assert {row.tenant for row in access_all_usage(world.operator)} == {"acme", "rival"}
    with pytest.raises(PermissionDenied):
        access_all_usage(world.owner)


def test_served_models_and_replicas_of_another_tenant_stay_hidden(world: World) -> None:
    open_model = ServedModel.objects.create(name="open", source="/m")
    closed = ServedModel.objects.create(name="closed", source="/m", public=False)
    closed.tenants.add(world.rival)
    for model in (open_model, closed):
        Replica.objects.create(served_model=model, replica_id=model.name)
    assert list(access_served_models(world.acme)) == [open_model]
    assert list(access_served_models(world.rival)) == [closed, open_model]
    assert [r.replica_id for r in access_replicas(world.acme)] == ["open"]
