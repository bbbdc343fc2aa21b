"""allauth's hooks for OpenID Connect: who is let in, and as what."""

from __future__ import annotations

from typing import Any

from allauth.account.utils import filter_users_by_email
from allauth.core.exceptions import ImmediateHttpResponse
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.models import SocialAccount, SocialLogin
from django.conf import settings
from django.db import transaction
from django.http import HttpRequest
from django.shortcuts import render

from console.identity.groups import groups_in, remember
from console.identity.provider_session import ProviderSession
from tenants.actions.sign_on import SIGN_ON, grants_of, sync_grants
from tenants.audit import record
from tenants.models import Membership, User


class SignOnAdapter(DefaultSocialAccountAdapter):
    """The provider's groups decide; whoever has no group that we know, and no tenant, stays out."""

    def is_open_for_signup(self, request: HttpRequest, sociallogin: SocialLogin) -> bool:
        """Whether somebody new may come in: their groups give them something."""
        return bool(grants_of(groups_of(sociallogin), settings.OIDC_ROLES))

    def is_auto_signup_allowed(self, request: HttpRequest, sociallogin: SocialLogin) -> bool:
        """Never by a form: an address that somebody else has is left out, not asked for."""
        return True

    def authenticate_by_email(self, sociallogin: SocialLogin) -> Any:
        """Somebody we know by a verified address. Staff and operators connect it themselves.

        An account that another identity of the provider is connected with is that one's: whoever
        has an invitation's link can make an account in somebody else's name, and wait for them.
        """
        found = super().authenticate_by_email(sociallogin)
        if found is None:
            return None
        user, account = found[0], sociallogin.account
        if user.is_staff or user.is_superuser:
            return None
        other = SocialAccount.objects.filter(user=user, provider=account.provider)
        return None if other.exclude(uid=account.uid).exists() else found

    def pre_social_login(self, request: HttpRequest, sociallogin: SocialLogin) -> None:
        """Give somebody we know what their groups are worth today."""
        if sociallogin.state.get("process") == "connect":
            return
        if not sociallogin.is_existing:
            if _address_taken(sociallogin):
                taken = render(request, "account/sign_on_taken.html", status=409)
                raise ImmediateHttpResponse(taken)
            return
        user = sociallogin.user
        sync_grants(user=user, groups=groups_of(sociallogin), roles=settings.OIDC_ROLES)
        user.refresh_from_db()
        if not user.is_superuser and not Membership.objects.filter(user=user).exists():
            refused = render(request, "account/signup_closed.html", status=403)
            raise ImmediateHttpResponse(refused)
        if sociallogin.account.pk is not None:
            remember(sociallogin)

    def get_requests_session(self) -> ProviderSession:
        """By the rules of egress."""
        return ProviderSession()

    def save_user(self, request: HttpRequest, sociallogin: SocialLogin, form: Any = None) -> User:
        """Somebody new, with what their groups are worth."""
        with transaction.atomic():
            user: User = super().save_user(request, sociallogin, form)
            changes = {"username": [None, user.username], "email": [None, user.email]}
            record(actor=SIGN_ON, action="user.create", target=user, changes=changes)
            sync_grants(user=user, groups=groups_of(sociallogin), roles=settings.OIDC_ROLES)
            remember(sociallogin)
        user.refresh_from_db()
        return user


def _address_taken(sociallogin: SocialLogin) -> bool:
    """Whether somebody here has this address, and we can't know that it's the same person."""
    addresses = [address.email for address in sociallogin.email_addresses]
    return any(filter_users_by_email(address) for address in addresses)


def groups_of(sociallogin: SocialLogin) -> set[str]:
    """The groups that the provider names at a sign-in."""
    return groups_in(sociallogin.account.extra_data)
