"""Writing audit rows."""

from contextvars import ContextVar
from typing import Any

from django.db import models, transaction

from tenants.actors import Actor
from tenants.models import AuditEntry, Tenant

SECRET_FIELDS = frozenset({"salt", "digest", "password"})
#: The IP address that the request being served came from; "" for commands and workers.
acting_from: ContextVar[str] = ContextVar("acting_from", default="")


def record(
    *,
    actor: Actor,
    action: str,
    target: models.Model,
    tenant: Tenant | None = None,
    **details: Any,
) -> AuditEntry:
    """Add an audit row to the transaction that does the deed.

    Raises: RuntimeError outside a transaction, where deed and row could come apart, and ValueError
    when `details` holds a secret.
    """
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError(f"{action}: an audit row must be written in the deed's transaction.")
    if leaked := SECRET_FIELDS & {*details, *details.get("changes", ())}:
        raise ValueError(f"{action}: {', '.join(leaked)} must not be audited.")
    return AuditEntry.objects.create(
        actor=actor.user,
        actor_kind=actor.kind,
        actor_label=actor.label[:200],
        actor_key=actor.key,
        address=acting_from.get()[:45],
        tenant=tenant,
        action=action,
        target_type=target._meta.model_name or "",
        target_id=str(target.pk),
        target_label=str(target)[:250],
        details=details,
    )
