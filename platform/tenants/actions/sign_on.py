"""What groups of an identity provider are worth here."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from django.db import transaction

from tenants.actions.members import add_member, change_role, remove_member
from tenants.actions.users import update_user
from tenants.actors import Actor
from tenants.errors import Conflict
from tenants.models import Membership, Role, Tenant, User

logger = logging.getLogger(__name__)

SIGN_ON = Actor("single sign-on")
OPERATOR = "operator"


def grants_of(groups: Collection[str], roles: Mapping[str, str]) -> dict[str, str]:
    """`{tenant: role}` with the highest role of all groups; `{"operator": "operator"}` besides.

    `roles`: group -> "operator" or "tenant:role".
    """
    found: dict[str, str] = {}
    for group in groups:
        target = roles.get(group)
        if target is None:
            continue
        tenant, _, role = target.partition(":")
        if tenant == OPERATOR and not role:
            found[OPERATOR] = OPERATOR
        elif tenant not in found or Role(role).rank > Role(found[tenant]).rank:
            found[tenant] = role
    return found


@transaction.atomic
def sync_grants(*, user: User, groups: Collection[str], roles: Mapping[str, str]) -> None:
    """Make a person's roles what their groups say today.

    It gives, changes and takes what came by sign-on; what somebody gave by hand stays. The last
    owner of a tenant and the last operator stay as well.
    """
    grants = grants_of(groups, roles)
    operator = grants.pop(OPERATOR, None) is not None
    named = {target.partition(":")[0] for target in roles.values()} - {OPERATOR}
    # Tenants are locked before people, in the order in which every other change locks them.
    for tenant in Tenant.objects.select_for_update().filter(slug__in=named).order_by("pk"):
        _sync_tenant(user, tenant, grants.get(tenant.slug))
    _sync_operator(user, operator)


def _sync_operator(user: User, wanted: bool) -> None:
    if wanted and not user.is_superuser:
        update_user(actor=SIGN_ON, user=user, is_superuser=True, is_staff=True)
        User.objects.filter(pk=user.pk).update(operator_by_sign_on=True)
    elif not wanted and user.operator_by_sign_on:
        try:
            update_user(actor=SIGN_ON, user=user, is_superuser=False, is_staff=False)
        except Conflict:
            logger.warning("%s is the last operator and stays one, without the group", user)
            return
        User.objects.filter(pk=user.pk).update(operator_by_sign_on=False)


def _sync_tenant(user: User, tenant: Tenant, role: str | None) -> None:
    membership = Membership.objects.filter(user=user, tenant=tenant).first()
    if membership is None:
        if role is not None:
            made = add_member(actor=SIGN_ON, tenant=tenant, user=user, role=role)
            Membership.objects.filter(pk=made.pk).update(by_sign_on=True)
    elif membership.by_sign_on:
        try:
            if role is None:
                remove_member(actor=SIGN_ON, membership=membership)
            else:
                change_role(actor=SIGN_ON, membership=membership, role=role)
        except Conflict:
            logger.warning("%s is the last owner of %s and stays one", user, tenant.slug)
