"""Who belongs to a tenant."""

import pytest

from common.errors import Conflict, NotFound, PermissionDenied
from engine.contract.errors import InvalidRequest
from tenants import actions
from tenants.models import ApiKey, AuditEntry, Membership, Role
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db, pytest.mark.database]


def membership(world: World, name: str) -> Membership:
    return Membership.objects.get(tenant=world.acme, user=world.user(name))


def test_admins_add_members_up_to_their_own_role(world: World) -> None:
    actions.add_member(actor=world.admin, tenant=world.acme, user=world.outsider, role="admin")
    assert membership(world, "outsider").role == Role.ADMIN
    with pytest.raises(PermissionDenied):
        actions.add_member(actor=world.admin, tenant=world.acme, user=world.operator, role="owner")


@pytest.mark.parametrize("name", ["member", "viewer"])
def test_members_and_viewers_add_nobody(world: World, name: str) -> None:
    with pytest.raises(PermissionDenied):
        actions.add_member(
            actor=world.user(name), tenant=world.acme, user=world.outsider, role="viewer"
        )


def test_outsiders_find_no_tenant(world: World) -> None:
    with pytest.raises(NotFound):
        actions.add_member(
            actor=world.outsider, tenant=world.acme, user=world.outsider, role="owner"
        )
    with pytest.raises(NotFound):
        actions.remove_member(actor=world.outsider, membership=membership(world, "member"))


def test_nobody_joins_twice_or_in_an_unknown_role(world: World) -> None:
    with pytest.raises(Conflict):
        actions.add_member(actor=world.owner, tenant=world.acme, user=world.member, role="viewer")
    with pytest.raises(InvalidRequest) as caught:
        actions.add_member(actor=world.owner, tenant=world.acme, user=world.outsider, role="god")
    assert caught.value.param == "role"


def test_an_admin_can_neither_rise_nor_lower_an_owner(world: World) -> None:
    with pytest.raises(PermissionDenied):
        actions.change_role(
            actor=world.admin, membership=membership(world, "admin"), role=Role.OWNER
        )
    with pytest.raises(PermissionDenied):
        actions.change_role(
            actor=world.admin, membership=membership(world, "owner"), role=Role.VIEWER
        )


def test_the_last_owner_stays(world: World) -> None:
    local_membership = membership(world, "owner")
    with pytest.raises(Conflict):
        actions.change_role(actor=world.owner, membership=local_membership, role=Role.ADMIN)
    with pytest.raises(Conflict):
        actions.remove_member(actor=world.owner, membership=local_membership)
    actions.change_role(actor=world.owner, membership=membership(world, "admin"), role=Role.OWNER)
    actions.remove_member(actor=world.owner, membership=local_membership)
    assert not Membership.objects.filter(pk=local_membership.pk).exists()


def test_a_change_of_role_is_audited_with_both_roles(world: World) -> None:
    actions.change_role(actor=world.owner, membership=membership(world, "viewer"), role="member")
    entry = AuditEntry.objects.first()
    assert entry is not None
    assert entry.details == {"changes": {"role": ["viewer", "member"]}}
    assert (entry.actor, entry.actor_label) == (world.owner, "owner")


def test_who_leaves_takes_their_keys_with_them(world: World) -> None:
    actions.remove_member(actor=world.member, membership=membership(world, "member"))
    assert ApiKey.objects.get(pk=world.key.pk).state() == "revoked"
    verbs = list(AuditEntry.objects.values_list("action", flat=True)[:2])
    assert verbs == ["member.remove", "api_key.revoke"]


def test_a_membership_that_is_gone_is_not_found(world: World) -> None:
    gone = membership(world, "viewer")
    actions.remove_member(actor=world.owner, membership=gone)
    with pytest.raises(NotFound):
        actions.remove_member(actor=world.owner, membership=gone)
