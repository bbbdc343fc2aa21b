"""Validity of open sockets' sessions, and the requirement of a second factor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from allauth.mfa.models import Authenticator
from django.conf import settings
from django.contrib.sessions.models import Session
from django.http import HttpRequest
from django.utils import timezone

from common.db import pages
from tenants.models import Membership, Role, User

OPERATOR = "operator"
ROLES = (OPERATOR, *Role.values)


def needs_second_factor(user: User) -> bool:
    """Whether one of the user's roles requires a second factor that they haven't set up."""
    asked = settings.QUIRE.mfa_roles
    if not asked or not user.is_active:
        return False
    is_required = OPERATOR in asked and user.is_superuser
    roles = [role for role in asked if role != OPERATOR]
    if not is_required and roles:
        is_required = Membership.objects.filter(user=user, role__in=roles).exists()
    factors = (Authenticator.Type.TOTP, Authenticator.Type.WEBAUTHN)
    return is_required and not Authenticator.objects.filter(user=user, type__in=factors).exists()


class UserRequest(HttpRequest):
    """The request of a view with `login_required`, for type checking."""

    user: User


@dataclass(frozen=True)
class SessionSnapshot:
    """A session when its socket was opened. `auth_hash`: the user's at that time."""

    key: str
    user_id: int
    auth_hash: str


def snapshot_session(key: str, user: User) -> SessionSnapshot:
    """The session of a user who was just authenticated by it."""
    return SessionSnapshot(key, user.pk, user.get_session_auth_hash())


def filter_valid_sessions(seen: Iterable[SessionSnapshot]) -> set[SessionSnapshot]:
    """Those that still exist and weren't ended, and whose users may log in.

    Raises: DatabaseError.
    """
    snapshots = set(seen)
    now = timezone.now()
    keys: set[str] = set()
    hashes: dict[int, str] = {}
    for part in pages({snapshot.key for snapshot in snapshots}):
        rows = Session.objects.filter(session_key__in=part, expire_date__gt=now)
        keys.update(rows.values_list("session_key", flat=True))
    for ids in pages({snapshot.user_id for snapshot in snapshots}):
        for user in User.objects.filter(pk__in=ids, is_active=True):
            hashes[user.pk] = user.get_session_auth_hash()
    return {
        snapshot
        for snapshot in snapshots
        if snapshot.key in keys and hashes.get(snapshot.user_id) == snapshot.auth_hash
    }
