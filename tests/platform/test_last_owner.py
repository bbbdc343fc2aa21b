"""FAULTS 75: a tenant keeps an owner and the installation an operator, whoever takes them away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.test import Client
from django.urls import reverse

from common.errors import Conflict
from engine.contract.errors import QuireError
from tenants import actions
from tenants.actions.users import sync_roles_from_groups
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Membership, Tenant, User
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db(transaction=True)]


def owners(tenant: Tenant) -> list[str]:
    rows = Membership.objects.filter(tenant=tenant, role="owner", user__is_active=True)
    return list(rows.values_list("user__username", flat=True))


def operators() -> list[str]:
    rows = User.objects.filter(is_superuser=True, is_active=True)
    return list(rows.values_list("username", flat=True))


def owned(user: User) -> Membership:
    return Membership.objects.get(user=user, role="owner")


def as_operator(world: World) -> Client:
    client = Client()
    client.force_login(world.operator)
    return client


# Each face's way to take somebody away. It returns True where the face said why not.


def by_console(world: World, act: str, user: User) -> bool:
    pk = owned(user).pk
    name = {"demote": "change-role", "remove": "remove-member"}[act]
    answer = as_operator(world).post(reverse(name, args=[pk]), {"role": "member"})
    return "needs at least one owner" in answer.content.decode()


def by_rest(world: World, act: str, user: User) -> bool:
    client = as_operator(world)
    if act in ("deactivate", "delete", "take standing"):
        url = f"/api/users/{user.pk}/"
        body = {"is_active": False} if act == "deactivate" else {"is_superuser": False}
    else:
        url = f"/api/tenants/acme/members/{owned(user).pk}/"
        body = {"role": "member"}
    answer = (
        client.delete(url)
        if act in ("delete", "remove")
        else client.patch(url, body, content_type="application/json")
    )
    return answer.status_code == 409


def by_command(world: World, act: str, user: User) -> bool:
    words = {
        "deactivate": ("update_user", user.username, "--off"),
        "delete": ("delete_user", user.username),
        "take standing": ("update_user", user.username, "--no-operator"),
        "demote": ("set_member", user.username, "--tenant", "acme", "--role", "member"),
        "remove": ("remove_member", user.username, "--tenant", "acme"),
    }[act]
    try:
        call_command(*words)
    except CommandError as error:
        return "needs at least one" in str(error)
    return False


def by_groups(world: World, act: str, user: User) -> bool:
    roles = {"leads": "acme:owner", "devs": "acme:member", "ops": "operator"}
    Membership.objects.filter(user=user).update(by_sign_on=True)
    User.objects.filter(pk=user.pk).update(operator_by_sign_on=user.is_superuser)
    user.refresh_from_db()
    sync_roles_from_groups(user=user, groups=["devs"] if act == "demote" else [], roles=roles)
    return True  # the sign-in goes on, and the log says it


def by_the_shell(world: World, act: str, user: User) -> bool:
    try:
        if act == "delete":
            User.objects.get(pk=user.pk).delete()
        elif act == "delete selected":
            User.objects.filter(pk=user.pk).delete()
        else:
            owned(user).delete()
    except Conflict:
        return True
    return False


Face = Callable[[World, str, User], bool]
FACES: list[tuple[Face, tuple[str, ...]]] = [
    (by_console, ("demote", "remove")),
    (by_rest, ("deactivate", "demote", "delete", "remove")),
    (by_command, ("deactivate", "demote", "delete", "remove")),
    (by_groups, ("demote", "remove")),
    (by_the_shell, ("delete", "delete selected", "remove")),
]
OPERATOR_FACES: list[tuple[Face, tuple[str, ...]]] = [
    (by_rest, ("deactivate", "take standing", "delete")),
    (by_command, ("deactivate", "take standing", "delete")),
    (by_groups, ("take standing",)),
    (by_the_shell, ("delete", "delete selected")),
]


def parametrize_faces(faces: list[tuple[Face, tuple[str, ...]]]) -> Any:
    pairs = [(face, act) for face, acts in faces for act in acts]
    ids = [f"{face.__name__[3:]}-{act}".replace(" ", "_") for face, act in pairs]
    return pytest.mark.parametrize(("face", "act"), pairs, ids=ids)


@parametrize_faces(FACES)
def test_fault_75_a_tenants_last_owner_stays_and_another_may_go(
    world: World, face: Face, act: str
) -> None:
    # One who is deactivated owns nothing for the count.
    other = User.objects.create(username="gone")
    actions.add_member(actor=SYSTEM_ACTOR, tenant=world.acme, user=other, role="owner")
    actions.update_user(actor=SYSTEM_ACTOR, user=other, is_active=False)
    assert face(world, act, world.owner)
    assert owners(world.acme) == ["owner"]
    actions.update_user(actor=SYSTEM_ACTOR, user=other, is_active=True)
    face(world, act, world.owner)
    assert owners(world.acme) == ["gone"]


@parametrize_faces(OPERATOR_FACES)
def test_fault_75_the_last_operator_stays_and_another_may_go(
    world: World, face: Face, act: str
) -> None:
    assert face(world, act, world.operator)
    assert operators() == ["operator"]
    User.objects.create_superuser("second", "second@example.org", "a long password")
    face(world, act, world.operator)
    assert operators() == ["second"]


def test_fault_75_all_owners_at_once_are_not_deleted_past_the_actions(world: World) -> None:
    actions.change_role(
        actor=SYSTEM_ACTOR, membership=Membership.objects.get(user=world.admin), role="owner"
    )
    with pytest.raises(Conflict, match="owner"):
        User.objects.filter(username__in=["owner", "admin"]).delete()
    with pytest.raises(Conflict, match="operator"):
        User.objects.filter(username="operator").delete()
    assert sorted(owners(world.acme)) == ["admin", "owner"]


def test_fault_75_a_tenant_that_goes_needs_no_owner(world: World) -> None:
    # Not made by an action: the audit log would refer to it, and keep it.
    bare = Tenant.objects.create(slug="bare", name="Bare")
    Membership.objects.create(tenant=bare, user=world.admin, role="owner")
    bare.delete()
    assert not Membership.objects.filter(tenant_id=bare.pk).exists()


def deactivate(user: User) -> None:
    actions.update_user(actor=SYSTEM_ACTOR, user=user, is_active=False)


def demote(user: User) -> None:
    actions.change_role(actor=SYSTEM_ACTOR, membership=owned(user), role="member")


def remove(user: User) -> None:
    actions.remove_member(actor=SYSTEM_ACTOR, membership=owned(user))


def delete(user: User) -> None:
    actions.delete_user(actor=SYSTEM_ACTOR, user=user)


def delete_row(user: User) -> None:
    User.objects.filter(pk=user.pk).delete()


def remove_standing(user: User) -> None:
    actions.update_user(actor=SYSTEM_ACTOR, user=user, is_superuser=False)


def two_at_once(act: Callable[[], None], other: Callable[[], None]) -> list[QuireError]:
    """The second begins when the first has changed its rows, and has time before it commits."""
    errors: list[QuireError] = []

    def second() -> None:
        try:
            other()
        except QuireError as error:
            errors.append(error)
        finally:
            connection.close()

    thread = threading.Thread(target=second)
    with transaction.atomic():
        act()
        thread.start()
        thread.join(0.5)
    thread.join(60)
    assert not thread.is_alive()
    return errors


ENDS = [deactivate, demote, remove, delete, delete_row]


# Lists of at most three: on PostgreSQL only the first and last case of longer ones run.
@pytest.mark.database
@pytest.mark.parametrize("one", ENDS[:3])
@pytest.mark.parametrize("other", ENDS[:1])
def test_fault_75_of_two_owners_one_is_deactivated_at_a_time(
    world: World, one: Callable[[User], None], other: Callable[[User], None]
) -> None:
    lose_both_owners(world, one, other)


@pytest.mark.database
@pytest.mark.parametrize("one", ENDS[3:])
@pytest.mark.parametrize("other", ENDS[1:2])
def test_fault_75_of_two_owners_one_is_demoted_at_a_time(
    world: World, one: Callable[[User], None], other: Callable[[User], None]
) -> None:
    lose_both_owners(world, one, other)


@pytest.mark.database
@pytest.mark.parametrize("one", ENDS[:3])
@pytest.mark.parametrize("other", ENDS[3:4])
def test_fault_75_of_two_owners_one_is_deleted_at_a_time(
    world: World, one: Callable[[User], None], other: Callable[[User], None]
) -> None:
    lose_both_owners(world, one, other)


def lose_both_owners(
    world: World, one: Callable[[User], None], other: Callable[[User], None]
) -> None:
    actions.change_role(
        actor=SYSTEM_ACTOR, membership=Membership.objects.get(user=world.admin), role="owner"
    )
    errors = two_at_once(lambda: one(world.owner), lambda: other(world.admin))
    assert [type(error) for error in errors] == [Conflict]
    assert owners(world.acme) == ["admin"]


@pytest.mark.database
@pytest.mark.parametrize("act", [deactivate, remove_standing, delete])
def test_fault_75_of_two_operators_one_goes_at_a_time(
    world: World, act: Callable[[User], None]
) -> None:
    second = User.objects.create_superuser("second", "second@example.org", "a long password")
    errors = two_at_once(lambda: act(world.operator), lambda: act(second))
    assert [type(error) for error in errors] == [Conflict]
    assert operators() == ["second"]
