"""Ending what a person has open: sessions, sockets, keys, invitations that they made.

Gateways look at sessions at each request, and at keys and open sockets once a second: all of it
ends everywhere within two seconds of the commit.
"""

from __future__ import annotations

from functools import partial

from django.db import transaction
from django.db.models import F
from django.db.models.signals import pre_delete
from django.dispatch import receiver
from django.utils import timezone

from tenants.actions.keys import revoke_keys_of
from tenants.actors import SYSTEM, Actor
from tenants.audit import record
from tenants.events import access_ended
from tenants.models import Invitation, Tenant, User


def end_sessions(user: User) -> None:
    """End every session of the user's, and the sockets that hang on them."""
    User.objects.filter(pk=user.pk).update(session_epoch=F("session_epoch") + 1)
    user.refresh_from_db(fields=["session_epoch"])
    transaction.on_commit(partial(access_ended.send, sender=User, user=user))


def end_access(*, actor: Actor, user: User, tenant: Tenant | None = None) -> None:
    """End a person's sessions, and their keys and invitations in one tenant or all of them.

    The caller has checked the actor's right, and writes the deed's own audit row.
    """
    revoke_keys_of(actor=actor, user=user, tenant=tenant)
    invitations = Invitation.objects.filter(created_by=user, accepted_at=None, revoked_at=None)
    if tenant is not None:
        invitations = invitations.filter(tenant=tenant)
    for invitation in invitations.select_for_update():
        end_invitation(actor, invitation)
    end_sessions(user)


def end_invitation(actor: Actor, invitation: Invitation) -> None:
    """Let the link in nobody any more. The caller has checked the actor's right."""
    invitation.revoked_at = timezone.now()
    invitation.save(update_fields=["revoked_at"])
    record(actor=actor, action="invitation.revoke", target=invitation, tenant=invitation.tenant)


@receiver(pre_delete, sender=User, dispatch_uid="tenants.offboarding")
def _keys_go_first(instance: User, **_: object) -> None:
    """However a user's row is deleted: a key whose holder is gone must not become the tenant's."""
    with transaction.atomic():
        revoke_keys_of(actor=SYSTEM, user=instance)
