"""People: who may change them, what ends with them, what the audit log says of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from common.errors import Conflict, NotFound, PermissionDenied
from engine.contract.errors import InvalidRequest
from tenants import actions, authentication
from tenants import api_keys as scopes
from tenants.actors import SYSTEM_ACTOR, key_actor
from tenants.authentication import AuthenticationFailed, authenticate
from tenants.models import AuditEntry, Membership, User
from tenants.sessions import filter_valid_sessions, snapshot_session
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db(transaction=True)]
PASSWORD = "correct horse battery"


def membership(world: World, name: str) -> Membership:
    return Membership.objects.get(tenant=world.acme, user=world.user(name))


def demote(world: World) -> None:
    actions.change_role(actor=world.owner, membership=membership(world, "member"), role="viewer")


def remove(world: World) -> None:
    actions.remove_member(actor=world.owner, membership=membership(world, "member"))


def deactivate(world: World) -> None:
    actions.update_user(actor=world.operator, user=world.member, is_active=False)


def delete(world: World) -> None:
    actions.delete_user(actor=world.operator, user=world.member)


def delete_past_the_actions(world: World) -> None:
    User.objects.filter(pk=world.member.pk).delete()


ENDS: list[Callable[[World], None]] = [demote, remove, deactivate, delete, delete_past_the_actions]


@pytest.mark.database
@pytest.mark.parametrize("end", ENDS)
async def test_fault_43_a_persons_keys_and_sessions_end_with_their_rights(
    world: World, end: Callable[[World], None]
) -> None:
    def log_in() -> Any:
        client = Client()
        client.force_login(world.member)
        return snapshot_session(client.session.session_key, world.member), client

    seen, client = await asyncio.to_thread(log_in)
    assert (await authenticate(f"Bearer {world.secret}")).tenant == "acme"
    assert await asyncio.to_thread(filter_valid_sessions, [seen]) == {seen}
    await asyncio.to_thread(end, world)
    authentication.clear_cache()  # as another process does within a second
    with pytest.raises(AuthenticationFailed):
        await authenticate(f"Bearer {world.secret}")
    assert await asyncio.to_thread(filter_valid_sessions, [seen]) == set()
    page = await asyncio.to_thread(client.get, "/console/")
    assert page.status_code == 302
    verbs = set(
        await asyncio.to_thread(lambda: list(AuditEntry.objects.values_list("action", flat=True)))
    )
    assert "api_key.revoke" in verbs


@pytest.mark.database
async def test_fault_43_a_key_needs_its_holder_whatever_became_of_its_own_row(
    world: World,
) -> None:
    rows: list[Callable[[], Any]] = [
        lambda: User.objects.filter(pk=world.member.pk).update(is_active=False),
        lambda: Membership.objects.filter(user=world.member).delete(),
    ]
    for change in rows:
        assert (await authenticate(f"Bearer {world.secret}")).tenant == "acme"
        await asyncio.to_thread(change)
        authentication.clear_cache()
        with pytest.raises(AuthenticationFailed, match="holder of this API key"):
            await authenticate(f"Bearer {world.secret}")
        await asyncio.to_thread(User.objects.filter(pk=world.member.pk).update, is_active=True)
        authentication.clear_cache()


async def test_fault_43_a_viewers_key_asks_no_models(world: World) -> None:
    await asyncio.to_thread(Membership.objects.filter(user=world.member).update, role="viewer")
    caller = await authenticate(f"Bearer {world.secret}")
    assert caller.scopes == {scopes.MODELS, scopes.USAGE}


@pytest.mark.database
async def test_fault_43_keys_of_a_service_account_are_no_persons(world: World) -> None:
    def make() -> str:
        account = actions.create_service_account(actor=world.admin, tenant=world.acme, name="ci")
        key = actions.create_key(actor=world.admin, tenant=world.acme, service_account=account)
        actions.remove_member(actor=world.owner, membership=membership(world, "admin"))
        actions.delete_user(actor=world.operator, user=world.admin)
        return key.secret

    secret = await asyncio.to_thread(make)
    assert (await authenticate(f"Bearer {secret}")).tenant == "acme"

    def switch_off() -> None:
        (account,) = world.acme.service_accounts.all()
        actions.update_service_account(actor=world.owner, account=account, active=False)

    await asyncio.to_thread(switch_off)
    with pytest.raises(AuthenticationFailed):
        await authenticate(f"Bearer {secret}")


def test_a_service_accounts_keys_are_made_by_admins_within_its_tenant(world: World) -> None:
    with pytest.raises(PermissionDenied):
        actions.create_service_account(actor=world.member, tenant=world.acme, name="ci")
    with pytest.raises(PermissionDenied):
        actions.create_service_account(
            actor=world.admin, tenant=world.acme, name="ci", role="owner"
        )
    account = actions.create_service_account(actor=world.owner, tenant=world.acme, name="ci")
    with pytest.raises(Conflict):
        actions.create_service_account(actor=world.owner, tenant=world.acme, name="ci")
    for actor, tenant, error in (
        (world.member, world.acme, PermissionDenied),
        (world.outsider, world.rival, NotFound),
    ):
        with pytest.raises(error):
            actions.create_key(actor=actor, tenant=tenant, service_account=account)
    with pytest.raises(PermissionDenied, match="can't have operator rights"):
        actions.create_key(
            actor=SYSTEM_ACTOR, tenant=world.acme, service_account=account, scopes=["operator"]
        )


@pytest.mark.database
async def test_a_retired_service_accounts_keys_stay_revoked(world: World) -> None:
    def retire() -> str:
        account = actions.create_service_account(actor=world.owner, tenant=world.acme, name="ci")
        key = actions.create_key(actor=world.owner, tenant=world.acme, service_account=account)
        actions.retire_service_account(actor=world.owner, account=account)
        actions.update_service_account(actor=world.owner, account=account, active=True)
        return key.secret

    secret = await asyncio.to_thread(retire)
    with pytest.raises(AuthenticationFailed, match="revoked"):
        await authenticate(f"Bearer {secret}")


def test_a_key_manages_its_own_tenant_with_its_holders_role_alone(world: World) -> None:
    key = actions.create_key(
        actor=world.admin, tenant=world.acme, scopes=["tenant:admin", "inference"]
    )
    actor = key_actor(key.key)
    assert not actor.is_operator
    assert actor.role_in(world.acme) == "admin"
    assert actor.role_in(world.rival) is None
    actions.add_member(actor=actor, tenant=world.acme, user=world.outsider, role="viewer")
    entry = AuditEntry.objects.filter(action="member.add").first()
    assert entry is not None
    assert (entry.actor_kind, entry.actor_key_id) == ("key", key.key.pk)
    with pytest.raises(PermissionDenied):
        actions.add_member(actor=actor, tenant=world.acme, user=world.operator, role="owner")
    with pytest.raises(PermissionDenied, match="scopes that it lacks"):
        actions.create_key(actor=actor, tenant=world.acme, scopes=["usage:read"])
    operators = key_actor(actions.create_key(actor=world.operator, tenant=world.acme).key)
    assert not operators.is_operator


@pytest.mark.parametrize(
    ("name", "limit_value", "less", "more"),
    [
        ("max_context_tokens", 100, 99, 101),
        ("requests_per_minute", 10, 10, None),
        ("expires_at", timedelta(days=2), timedelta(days=1), timedelta(days=3)),
        ("expires_at", timedelta(days=2), timedelta(days=2), None),
    ],
)
def test_a_key_gives_no_more_than_it_has(
    world: World, name: str, limit_value: Any, less: Any, more: Any
) -> None:
    now = timezone.now()

    def as_argument(value: Any) -> Any:
        return now + value if isinstance(value, timedelta) else value

    limit = {name: as_argument(limit_value)}
    fields = {"actor": world.admin, "tenant": world.acme, "scopes": ["tenant:admin", "inference"]}
    actor = key_actor(actions.create_key(**fields, **limit).key)
    fields |= {"actor": actor, "scopes": ["inference"]}
    assert getattr(
        actions.create_key(**fields, **{name: as_argument(less)}).key, name
    ) == as_argument(less)
    with pytest.raises(PermissionDenied, match=r"A new key (may have at most|must expire)"):
        actions.create_key(**fields, **{name: as_argument(more)})


# -- staff ------------------------------------------------------------------------------------


@pytest.fixture
def staff(world: World) -> User:
    """Somebody whom an operator gave the right to look after users."""
    user = actions.create_user(
        actor=world.operator, username="staff", password=PASSWORD, is_staff=True
    )
    rights = Permission.objects.filter(content_type__app_label="tenants", codename__contains="user")
    actions.set_staff_rights(actor=world.operator, user=user, groups=[], permissions=rights)
    return User.objects.get(pk=user.pk)


def rights_form(**changes: Any) -> dict[str, Any]:
    return {"memberships-TOTAL_FORMS": "0", "memberships-INITIAL_FORMS": "0", **changes}


def page_of(user: User, name: str = "change") -> str:
    return reverse(f"admin:tenants_user_{name}", args=[user.pk])


def test_fault_44_staff_cannot_raise_themselves(world: World, staff: User, client: Client) -> None:
    client.force_login(staff)
    every = list(Permission.objects.values_list("pk", flat=True))
    form = rights_form(is_superuser="on", is_staff="on", user_permissions=every, username="root")
    initial = set(staff.get_all_permissions())
    for user in (staff, world.operator):
        assert client.get(page_of(user)).status_code == 200
        assert client.post(page_of(user), form).status_code == 403
        assert client.post(page_of(user, "delete"), {"post": "yes"}).status_code == 403
    staff = User.objects.get(pk=staff.pk)
    assert not staff.is_superuser
    assert set(staff.get_all_permissions()) == initial


@pytest.mark.database
def test_fault_44_the_actions_hold_it_too(world: World, staff: User) -> None:
    for operation in (
        lambda: actions.update_user(actor=staff, user=staff, is_superuser=True),
        lambda: actions.update_user(actor=staff, user=world.member, is_staff=True),
        lambda: actions.update_user(actor=staff, user=world.operator, email="a@b.example"),
        lambda: actions.set_password(actor=staff, user=world.operator, password=PASSWORD),
        lambda: actions.delete_user(actor=staff, user=world.operator),
        lambda: actions.create_user(actor=staff, username="x", is_superuser=True),
        lambda: actions.set_staff_rights(actor=staff, user=staff, groups=[], permissions=[]),
        lambda: actions.update_user(actor=world.owner, user=world.member, email="a@b.example"),
        lambda: actions.set_password(actor=world.owner, user=world.member, password=PASSWORD),
    ):
        with pytest.raises(PermissionDenied):
            operation()
    actions.update_user(actor=staff, user=world.member, email="new@example.org")
    entry = AuditEntry.objects.first()
    assert entry is not None
    assert entry.details["changes"] == {"email": ["member@example.org", "new@example.org"]}


def test_fault_44_the_audit_row_holds_before_and_after_and_the_address(
    world: World, client: Client
) -> None:
    client.force_login(world.operator)
    group = Group.objects.create(name="helpers")
    form = rights_form(is_staff="on", groups=[group.pk])
    client.post(page_of(world.member), form, REMOTE_ADDR="203.0.113.9")
    (rights,) = AuditEntry.objects.filter(action="user.update")
    assert rights.details["changes"] == {"groups": [[], ["helpers"]]}
    assert (rights.address, rights.actor_kind) == ("203.0.113.9", "person")
    world.member.refresh_from_db()
    assert not world.member.is_staff
    assert list(world.member.groups.all()) == [group]


def test_a_password_that_somebody_sets_is_audited_and_ends_sessions(world: World) -> None:
    member = Client()
    member.force_login(world.member)
    actions.set_password(actor=world.operator, user=world.member, password=PASSWORD)
    world.member.refresh_from_db()
    assert world.member.check_password(PASSWORD)
    entry = AuditEntry.objects.get(action="user.set_password")
    assert (entry.actor, entry.target_label) == (world.operator, "member")
    assert PASSWORD not in str(entry.details)
    assert member.get("/console/").status_code == 302


def test_weak_passwords_are_refused_by_name(world: World) -> None:
    with pytest.raises(InvalidRequest) as caught:
        actions.set_password(actor=SYSTEM_ACTOR, user=world.member, password="12345678")
    assert caught.value.param == "password"


@pytest.mark.database
def test_the_last_operator_stays(world: World) -> None:
    for operation in (
        lambda: actions.update_user(actor=SYSTEM_ACTOR, user=world.operator, is_active=False),
        lambda: actions.update_user(actor=SYSTEM_ACTOR, user=world.operator, is_superuser=False),
        lambda: actions.delete_user(actor=SYSTEM_ACTOR, user=world.operator),
    ):
        with pytest.raises(Conflict, match="at least one operator"):
            operation()
    actions.create_user(actor=SYSTEM_ACTOR, username="second", is_superuser=True)
    actions.update_user(actor=SYSTEM_ACTOR, user=world.operator, is_superuser=False)


async def test_an_operator_who_is_none_any_more_loses_keys(world: World) -> None:
    def make() -> str:
        key = actions.create_key(actor=world.operator, tenant=world.acme, scopes=["operator"])
        actions.create_user(actor=SYSTEM_ACTOR, username="second", is_superuser=True)
        actions.update_user(actor=SYSTEM_ACTOR, user=world.operator, is_superuser=False)
        return key.secret

    secret = await asyncio.to_thread(make)
    with pytest.raises(AuthenticationFailed):
        await authenticate(f"Bearer {secret}")


def test_own_passwords_keep_the_own_session_and_end_others(world: World) -> None:
    world.member.set_password("an old password of ink")
    world.member.save()
    local_client, elsewhere = Client(), Client()
    for client in (local_client, elsewhere):
        client.force_login(world.member)
    local_client.post(
        "/account/password/",
        {
            "oldpassword": "an old password of ink",
            "password1": PASSWORD,
            "password2": PASSWORD,
        },
    )
    assert local_client.get("/console/").status_code == 200
    assert elsewhere.get("/console/").status_code == 302
    assert AuditEntry.objects.filter(action="user.set_password").count() == 1
