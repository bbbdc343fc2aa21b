"""What stays in replicas' memory."""

from __future__ import annotations

from django.db import transaction

from adapters import pins
from adapters.actions.rights import announce, locked_adapter
from adapters.models import Adapter
from tenants.actors import Actor, as_actor, require_operator
from tenants.audit import record
from tenants.models import User


@transaction.atomic
def pin(*, actor: Actor | User, adapter: Adapter) -> Adapter:
    """Keep what answers under the adapter's names in the memory of every replica of its model.

    Memory is everybody's: this is for operators. Raises: `PermissionDenied`, `NotFound`; `Conflict`
    where more would be pinned than half of a replica's memory for adapters; `ServiceUnavailable`.
    """
    return _set(actor, adapter, pinned=True)


@transaction.atomic
def unpin(*, actor: Actor | User, adapter: Adapter) -> Adapter:
    """Have its memory go to others again once nobody uses it. Raises: as `pin`."""
    return _set(actor, adapter, pinned=False)


def _set(actor: Actor | User, adapter: Adapter, *, pinned: bool) -> Adapter:
    actor = as_actor(actor)
    require_operator(actor)
    found = locked_adapter(adapter)
    if found.pinned == pinned:
        return found
    if pinned:
        pins.check(found)
    found.pinned = pinned
    found.save(update_fields=["pinned", "changed_at"])
    record(
        actor=actor,
        action="adapter.pin" if pinned else "adapter.unpin",
        target=found,
        tenant=found.tenant,
        changes={"pinned": [not pinned, pinned]},
    )
    announce(found)
    return found
