"""django-allauth's adapters for accounts, second factors and OpenID Connect."""

from __future__ import annotations

from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from allauth.account.utils import filter_users_by_email
from allauth.core.exceptions import ImmediateHttpResponse
from allauth.mfa.adapter import DefaultMFAAdapter
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.models import SocialAccount, SocialLogin
from django.conf import settings
from django.db import transaction
from django.http import HttpRequest
from django.shortcuts import render

from accounts.group_sync import ProviderSession, groups_in, store_refresh_token
from common.one_time import fernet_for
from tenants import actions
from tenants.actions.users import SSO_ACTOR, roles_from_groups, sync_roles_from_groups
from tenants.audit import log_action
from tenants.models import Membership, User


class AccountAdapter(DefaultAccountAdapter):
    """Accounts are created by operators, invitations and single sign-on; there is no sign-up."""

    error_messages = {
        **DefaultAccountAdapter.error_messages,
        "too_many_login_attempts": "Too many wrong passwords. Wait five minutes, then try again.",
    }

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        """Return False: the sign-up form is closed."""
        return False

    def get_client_ip(self, request: HttpRequest) -> str:
        """Return the client's address. The server has already applied trusted proxy headers."""
        return request.META.get("REMOTE_ADDR") or "0.0.0.0"  # noqa: S104 - unknown address

    def _get_login_attempts_cache_key(self, request: HttpRequest, **credentials: Any) -> str:
        """Count attempts by name and address, so that no one can lock another user out."""
        name = super()._get_login_attempts_cache_key(request, **credentials)
        return f"{name}@{self.get_client_ip(request)}"

    def set_password(self, user: User, password: str) -> None:
        """Set the password with our action, which ends sessions and writes the audit log."""
        saved = actions.set_password(actor=user, user=user, password=password)
        user.password, user.session_epoch = saved.password, saved.session_epoch

    def send_mail(self, template_prefix: str, email: str, context: dict[str, Any]) -> None:
        """Send a mail only if a mail server is configured."""
        if settings.QUIRE.smtp_url:
            super().send_mail(template_prefix, email, context)


class SecondFactorAdapter(DefaultMFAAdapter):
    """Encrypts authenticators' secrets with a key that isn't in the database."""

    def encrypt(self, text: str) -> str:
        """Encrypt a secret for the database."""
        return fernet_for("second factors").encrypt(text.encode()).decode()

    def decrypt(self, encrypted_text: str) -> str:
        """Decrypt a secret from the database."""
        return fernet_for("second factors").decrypt(encrypted_text.encode()).decode()


class SocialAccountAdapter(DefaultSocialAccountAdapter):
    """Grants access by the provider's groups: users without a known group or tenant are refused."""

    def is_open_for_signup(self, request: HttpRequest, sociallogin: SocialLogin) -> bool:
        """Return whether a new user's groups grant any role."""
        return bool(roles_from_groups(groups_of(sociallogin), settings.QUIRE.oidc_roles))

    def is_auto_signup_allowed(self, request: HttpRequest, sociallogin: SocialLogin) -> bool:
        """Return True: no sign-up form. An email address in use is left out, not asked for."""
        return True

    def authenticate_by_email(self, sociallogin: SocialLogin) -> Any:
        """Find the user by a verified email address. Staff and operators must connect their
        identity themselves.

        An account already connected to another identity of the provider isn't used: anyone with an
        invitation link could have created it with this person's address.
        """
        user_and_address = super().authenticate_by_email(sociallogin)
        if user_and_address is None:
            return None
        user, account = user_and_address[0], sociallogin.account
        if user.is_staff or user.is_superuser:
            return None
        other = SocialAccount.objects.filter(user=user, provider=account.provider)
        return None if other.exclude(uid=account.uid).exists() else user_and_address

    def pre_social_login(self, request: HttpRequest, sociallogin: SocialLogin) -> None:
        """Apply the roles of a known user's current groups."""
        if sociallogin.state.get("process") == "connect":
            return
        if not sociallogin.is_existing:
            if _is_email_in_use(sociallogin):
                response = render(request, "account/sign_on_taken.html", status=409)
                raise ImmediateHttpResponse(response)
            return
        user = sociallogin.user
        roles = settings.QUIRE.oidc_roles
        sync_roles_from_groups(user=user, groups=groups_of(sociallogin), roles=roles)
        user.refresh_from_db()
        if not user.is_superuser and not Membership.objects.filter(user=user).exists():
            refused = render(request, "account/signup_closed.html", status=403)
            raise ImmediateHttpResponse(refused)
        if sociallogin.account.pk is not None:
            store_refresh_token(sociallogin)

    def get_requests_session(self) -> ProviderSession:
        """Return a session that obeys the egress rules."""
        return ProviderSession()

    def save_user(self, request: HttpRequest, sociallogin: SocialLogin, form: Any = None) -> User:
        """Create a user with the roles of their groups."""
        with transaction.atomic():
            user: User = super().save_user(request, sociallogin, form)
            changes = {"username": [None, user.username], "email": [None, user.email]}
            log_action(SSO_ACTOR, "user.create", user, changes=changes)
            sync_roles_from_groups(
                user=user, groups=groups_of(sociallogin), roles=settings.QUIRE.oidc_roles
            )
            store_refresh_token(sociallogin)
        user.refresh_from_db()
        return user


def _is_email_in_use(sociallogin: SocialLogin) -> bool:
    """Return whether the email address belongs to an account that may be another person's."""
    addresses = [address.email for address in sociallogin.email_addresses]
    return any(filter_users_by_email(address) for address in addresses)


def groups_of(sociallogin: SocialLogin) -> set[str]:
    """Return the groups that the provider named at sign-in."""
    return groups_in(sociallogin.account.extra_data)
