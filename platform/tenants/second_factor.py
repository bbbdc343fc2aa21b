"""Who must have a second factor, and has none."""

from __future__ import annotations

from allauth.mfa.models import Authenticator
from django.conf import settings

from tenants.models import Membership, Role, User

OPERATOR = "operator"
ROLES = (OPERATOR, *Role.values)


def lacks_second_factor(user: User) -> bool:
    """Whether one of the user's roles asks for a second factor that they haven't set up."""
    asked = settings.MFA_REQUIRED_ROLES
    if not asked or not user.is_active:
        return False
    wanted = OPERATOR in asked and user.is_superuser
    roles = [role for role in asked if role != OPERATOR]
    if not wanted and roles:
        wanted = Membership.objects.filter(user=user, role__in=roles).exists()
    factors = (Authenticator.Type.TOTP, Authenticator.Type.WEBAUTHN)
    return wanted and not Authenticator.objects.filter(user=user, type__in=factors).exists()
