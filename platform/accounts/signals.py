"""Audit entries for allauth's own actions: second factors, connected accounts, logins."""

from __future__ import annotations

from typing import Any

from allauth.mfa.models import Authenticator
from allauth.socialaccount import signals as social
from django.contrib.auth.signals import user_logged_in
from django.db import transaction
from django.db.models.signals import post_delete, post_save
from django.dispatch import receiver

from tenants.actors import to_actor
from tenants.audit import log_action
from tenants.models import User


def _log_event(user: User, action: str, **details: Any) -> None:
    with transaction.atomic():
        log_action(to_actor(user), action, user, **details)


@receiver(user_logged_in, dispatch_uid="accounts.audit")
def _logged_in(user: User, **_: object) -> None:
    _log_event(user, "user.log_in")


@receiver(post_save, sender=Authenticator, dispatch_uid="accounts.audit")
def _added(instance: Authenticator, created: bool, **_: object) -> None:
    """Write the audit entry in the same transaction."""
    if created:
        _log_event(instance.user, "second_factor.add", type=instance.type)


@receiver(post_delete, sender=Authenticator, dispatch_uid="accounts.audit")
def _removed(instance: Authenticator, origin: object, **_: object) -> None:
    if not isinstance(origin, User):  # not if it is deleted along with its user
        _log_event(instance.user, "second_factor.remove", type=instance.type)


@receiver(social.social_account_added, dispatch_uid="accounts.audit")
def _connected(sociallogin: Any, **_: object) -> None:
    _log_event(sociallogin.user, "sign_on.connect", subject=sociallogin.account.uid)


@receiver(social.social_account_removed, dispatch_uid="accounts.audit")
def _disconnected(socialaccount: Any, **_: object) -> None:
    _log_event(socialaccount.user, "sign_on.disconnect", subject=socialaccount.uid)
