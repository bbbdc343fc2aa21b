"""Who made an object, from the caller."""

from typing import Any

from tenants.actors import Actor
from tenants.authentication import Caller
from tenants.models import User


def owner_fields(caller: Caller) -> dict[str, Any]:
    """Columns of `storage.models.owned.Owned`."""
    return {"tenant_id": caller.tenant_id, "key_id": caller.key_id, "user_id": caller.user_id}


def actor_of(caller: Caller) -> Actor:
    """For the audit log."""
    if caller.user_id is not None:
        user = User.objects.filter(pk=caller.user_id).first()
        if user is not None:
            return Actor(user.get_username(), user)
    return Actor(f"API key {caller.key_id}")
