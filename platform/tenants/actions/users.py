"""Creating, changing, deactivating and deleting users.

Operators may do everything. Staff with Django's permission to add, change or delete users may do so
for ordinary users, but can't make anyone staff or an operator.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from django.contrib.auth.models import Group, Permission
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Q
from django.db.models.signals import post_delete
from django.dispatch import receiver

from common.db import changed, save_valid
from common.errors import Conflict, NotFound, PermissionDenied
from engine.contract.errors import InvalidRequest
from tenants.actions.keys import end_sessions, revoke_access
from tenants.actions.members import add_member, change_role, check_last_owner, remove_member
from tenants.actors import Actor, require_operator, to_actor
from tenants.audit import log_action
from tenants.models import Membership, Role, Tenant, User

logger = logging.getLogger(__name__)

SSO_ACTOR = Actor("single sign-on")
OPERATOR = "operator"
PROFILE = ("username", "email", "first_name", "last_name", "is_active")
#: Fields that make a user staff or an operator; only operators may set them.
ROLE_FIELDS = ("is_staff", "is_superuser")


@transaction.atomic
def create_user(
    *,
    actor: Actor | User,
    username: str,
    email: str = "",
    password: str | None = None,
    is_staff: bool = False,
    is_superuser: bool = False,
) -> User:
    """Create a user. Without a password they log in by single sign-on or after a password reset.

    Raises: `PermissionDenied`, `InvalidRequest` with `param`, `Conflict` for a name that is taken.
    """
    actor = to_actor(actor)
    _require_right(actor, "add")
    if is_staff or is_superuser:
        require_operator(actor)
    user = User(
        username=username,
        email=User.objects.normalize_email(email),
        is_staff=is_staff or is_superuser,
        is_superuser=is_superuser,
    )
    _set_password(user, password)
    save_valid(user, unchecked=("password",))
    fields = {name: [None, getattr(user, name)] for name in (*PROFILE, *ROLE_FIELDS)}
    changes = {name: pair for name, pair in fields.items() if pair[1]}
    log_action(actor, "user.create", user, changes=changes)
    return user


@transaction.atomic
def update_user(*, actor: Actor | User, user: User, **changes: Any) -> User:
    """Change a user's profile (`PROFILE`) or roles (`ROLE_FIELDS`, operators alone).

    Deactivating a user or removing their roles ends their sessions, sockets and keys.

    Raises: `PermissionDenied`, `InvalidRequest` with `param`; `Conflict` for the last operator,
        or a tenant's last owner.
    """
    actor = to_actor(actor)
    if unknown := set(changes).difference(PROFILE, ROLE_FIELDS):
        raise InvalidRequest(f"{sorted(unknown)[0]} can't be changed.", param=sorted(unknown)[0])
    user = _locked(user)
    _require_right(actor, "change", user)
    if set(changes).intersection(ROLE_FIELDS):
        require_operator(actor)
    was_active, was_operator = user.is_active, user.is_active and user.is_superuser
    difference = changed(user, changes)
    if not difference:
        return user
    save_valid(user, unchecked=("password",))
    if was_operator and not (user.is_active and user.is_superuser):
        _check_last_operator()
    if was_active and not user.is_active:
        for owned in Membership.objects.select_related("tenant").filter(user=user, role=Role.OWNER):
            check_last_owner(owned.tenant)
    if any(difference.get(name, [None])[-1] is False for name in ("is_active", *ROLE_FIELDS)):
        revoke_access(actor=actor, user=user)
    log_action(actor, "user.update", user, changes=difference)
    return user


@transaction.atomic
def set_staff_rights(
    *,
    actor: Actor | User,
    user: User,
    groups: Iterable[Group],
    permissions: Iterable[Permission],
) -> None:
    """Set a user's groups and permissions in the admin. For operators."""
    actor = require_operator(actor)
    user = _locked(user)
    previous_rights = _rights(user)
    user.groups.set(groups)
    user.user_permissions.set(permissions)
    after = _rights(user)
    difference = {
        name: [previous_rights[name], after[name]]
        for name in after
        if previous_rights[name] != after[name]
    }
    if difference:
        log_action(actor, "user.update", user, changes=difference)


@transaction.atomic
def set_password(*, actor: Actor | User, user: User, password: str | None) -> User:
    """Set or remove a user's password. Ends their sessions; the audit log records the actor.

    Users may set their own password; for others' the actor needs the permission to change them.
    """
    actor = to_actor(actor)
    user = _locked(user)
    if actor.user != user or actor.key is not None:
        _require_right(actor, "change", user)
    _set_password(user, password)
    user.save(update_fields=["password"])
    end_sessions(user)
    log_action(actor, "user.set_password", user)
    return user


@transaction.atomic
def delete_user(*, actor: Actor | User, user: User) -> None:
    """Delete a user. Their sessions, sockets and keys end; ledger and audit log keep the name.

    Raises: `PermissionDenied`; `Conflict` for the last operator, or a tenant's last owner.
    """
    actor = to_actor(actor)
    user = _locked(user)
    _require_right(actor, "delete", user)
    revoke_access(actor=actor, user=user)
    roles = dict(Membership.objects.filter(user=user).values_list("tenant__slug", "role"))
    log_action(
        actor,
        "user.delete",
        user,
        changes={name: [getattr(user, name), None] for name in (*PROFILE, *ROLE_FIELDS)},
        roles=roles,
    )
    user.delete()


def _require_right(actor: Actor, verb: str, target: User | None = None) -> None:
    """Raise `PermissionDenied` unless the actor may `add`, `change` or `delete` this user."""
    if actor.is_operator:
        return
    user = actor.user
    allowed = actor.key is None and user is not None and user.is_active and user.is_staff
    if user is None or not allowed or not user.has_perm(f"tenants.{verb}_user"):
        raise PermissionDenied("Only the operator of this installation may do this.")
    if target is not None and (target.is_staff or target.is_superuser) and target != user:
        raise PermissionDenied("Only the operator may change staff and operators.")


def _set_password(user: User, password: str | None) -> None:
    if password is not None:
        try:
            validate_password(password, user)
        except ValidationError as error:
            raise InvalidRequest(" ".join(error.messages), param="password") from error
    user.set_password(password)


def _rights(user: User) -> dict[str, list[str]]:
    return {
        "groups": sorted(user.groups.values_list("name", flat=True)),
        "user_permissions": sorted(
            f"{app}.{name}"
            for app, name in user.user_permissions.values_list(
                "content_type__app_label", "codename"
            )
        ),
    }


def _locked(user: User) -> User:
    """The current row.

    The rows by which operators and owners are counted are locked first, in a fixed order: two users
    who remove each other's roles are serialized.
    """
    tenants = Tenant.objects.select_for_update(of=("self",)).filter(memberships__user=user)
    list(tenants.order_by("pk"))
    people = User.objects.select_for_update().filter(Q(pk=user.pk) | Q(is_superuser=True))
    row = {person.pk: person for person in people.order_by("pk")}.get(user.pk)
    if row is None:
        raise NotFound("User not found.")
    return row


def _check_last_operator() -> None:
    """Raise `Conflict` if the preceding change removed the last active operator."""
    if not User.objects.filter(is_superuser=True, is_active=True).exists():
        raise Conflict("The installation needs at least one operator.")


@receiver(post_delete, sender=User, dispatch_uid="tenants.keep_an_operator")
def _deleted(instance: User, **_: object) -> None:
    """Runs however a row is deleted."""
    if instance.is_active and instance.is_superuser:
        _check_last_operator()


def roles_from_groups(groups: Collection[str], roles: Mapping[str, str]) -> dict[str, str]:
    """`{tenant: role}` with the highest role of all groups, and `{"operator": "operator"}`.

    `roles`: group -> "operator" or "tenant:role".
    """
    granted: dict[str, str] = {}
    for group in groups:
        target = roles.get(group)
        if target is None:
            continue
        tenant, _, role = target.partition(":")
        if tenant == OPERATOR and not role:
            granted[OPERATOR] = OPERATOR
        elif tenant not in granted or Role(role).rank > Role(granted[tenant]).rank:
            granted[tenant] = role
    return granted


@transaction.atomic
def sync_roles_from_groups(
    *, user: User, groups: Collection[str], roles: Mapping[str, str]
) -> None:
    """Synchronize a user's roles with their groups.

    Adds, changes and removes roles that came from sign-on; roles given manually stay. The last
    owner of a tenant and the last operator stay as well.
    """
    grants = roles_from_groups(groups, roles)
    operator = grants.pop(OPERATOR, None) is not None
    named = {target.partition(":")[0] for target in roles.values()} - {OPERATOR}
    # Lock tenants before users, in the same order as all other changes.
    for tenant in Tenant.objects.select_for_update().filter(slug__in=named).order_by("pk"):
        _sync_tenant(user, tenant, grants.get(tenant.slug))
    _sync_operator(user, operator)


def _sync_operator(user: User, is_operator: bool) -> None:
    if is_operator and not user.is_superuser:
        update_user(actor=SSO_ACTOR, user=user, is_superuser=True, is_staff=True)
        User.objects.filter(pk=user.pk).update(operator_by_sign_on=True)
    elif not is_operator and user.operator_by_sign_on:
        try:
            update_user(actor=SSO_ACTOR, user=user, is_superuser=False, is_staff=False)
        except Conflict:
            logger.warning("%s is the last operator and stays one, without the group", user)
            return
        User.objects.filter(pk=user.pk).update(operator_by_sign_on=False)


def _sync_tenant(user: User, tenant: Tenant, role: str | None) -> None:
    membership = Membership.objects.filter(user=user, tenant=tenant).first()
    if membership is None:
        if role is not None:
            added = add_member(actor=SSO_ACTOR, tenant=tenant, user=user, role=role)
            Membership.objects.filter(pk=added.pk).update(by_sign_on=True)
    elif membership.by_sign_on:
        try:
            if role is None:
                remove_member(actor=SSO_ACTOR, membership=membership)
            else:
                change_role(actor=SSO_ACTOR, membership=membership, role=role)
        except Conflict:
            logger.warning("%s is the last owner of %s and stays one", user, tenant.slug)
