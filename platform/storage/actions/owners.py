"""Who made an object, from the caller."""

from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.utils import timezone

from tenants.actors import Actor, as_actor
from tenants.authentication import Caller
from tenants.models import ActorKind, ApiKey, User


def owner_fields(caller: Caller) -> dict[str, Any]:
    """Columns of `storage.models.owned.Owned`."""
    return {"tenant_id": caller.tenant_id, "key_id": caller.key_id, "user_id": caller.user_id}


def actor_of(caller: Caller) -> Actor:
    """For the audit log."""
    if caller.user_id is not None:
        user = User.objects.filter(pk=caller.user_id).first()
        if user is not None:
            return as_actor(user)
    key = ApiKey.objects.filter(pk=caller.key_id).first()
    return Actor(f"API key {key or caller.key_id}", kind=ActorKind.KEY, key=key)


def kept_until() -> datetime | None:
    """When what is kept from now on is forgotten; None for never."""
    days = settings.QUIRE["RESPONSE_DAYS"]
    return timezone.now() + timedelta(days=days) if days else None
