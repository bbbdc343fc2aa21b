"""The audit log: writing rows, and triggers that protect them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.db import connections, models, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.http import HttpRequest
from django.utils.decorators import sync_and_async_middleware

from tenants.actors import Actor
from tenants.models import AuditEntry, Tenant

COLUMNS = (
    *("id", "at", "actor_kind", "actor", "actor_id", "actor_key_id", "address", "tenant"),
    *("action", "target_type", "target_id", "target", "changes", "details"),
)


def as_record(entry: AuditEntry) -> dict[str, Any]:
    """An entry as in the API and in exported files."""
    details = dict(entry.details)
    return {
        "id": entry.pk,
        "at": entry.at.isoformat(),
        "actor_kind": entry.actor_kind,
        "actor": entry.actor_label,
        "actor_id": entry.actor_id,
        "actor_key_id": entry.actor_key_id,
        "address": entry.address,
        "tenant": entry.tenant.slug if entry.tenant else None,
        "action": entry.action,
        "target_type": entry.target_type,
        "target_id": entry.target_id,
        "target": entry.target_label,
        "changes": details.pop("changes", {}),
        "details": details,
    }


# The model refuses changes in Python; triggers refuse those that bypass it. They are created
# after every `migrate`, because SQLite drops a table's triggers when Django rebuilds the table.
# Only the log's retention (`tenants.audit_retention`) may delete rows, in transactions that declare
# it.

TABLE = AuditEntry._meta.db_table
ERROR_MESSAGE = "Audit entries can neither be changed nor deleted."

_SQLITE = [
    (
        f"CREATE TRIGGER IF NOT EXISTS audit_no_{verb.lower()} BEFORE {verb} ON {TABLE} "
        f"BEGIN SELECT RAISE(ABORT, '{ERROR_MESSAGE}'); END"
    )
    for verb in ("UPDATE", "DELETE")
]
_POSTGRESQL = [
    "CREATE OR REPLACE FUNCTION audit_stays() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN IF TG_OP = 'DELETE' AND current_setting('quire.audit_retention', true) = 'on' "
    f"THEN RETURN OLD; END IF; RAISE EXCEPTION '{ERROR_MESSAGE}'; END $$",
    "CREATE OR REPLACE TRIGGER audit_no_change BEFORE UPDATE OR DELETE ON "
    f"{TABLE} FOR EACH ROW EXECUTE FUNCTION audit_stays()",
    "CREATE OR REPLACE TRIGGER audit_no_truncate BEFORE TRUNCATE ON "
    f"{TABLE} FOR EACH STATEMENT EXECUTE FUNCTION audit_stays()",
]
_LIFT = {
    "sqlite": [f"DROP TRIGGER IF EXISTS audit_no_{verb}" for verb in ("update", "delete")],
    "postgresql": [
        f"DROP TRIGGER IF EXISTS {name} ON {TABLE}"
        for name in ("audit_no_change", "audit_no_truncate")
    ],
}
_GUARD = {"sqlite": _SQLITE, "postgresql": _POSTGRESQL}
#: Statements around the deletions of one transaction. SQLite has no variables, but only one writer
#: at a time: nothing else deletes while the trigger is dropped, and a rollback restores it.
_BEGIN = {
    "sqlite": "DROP TRIGGER audit_no_delete",
    "postgresql": "SET LOCAL quire.audit_retention = 'on'",
}
_END = {"sqlite": _SQLITE[1], "postgresql": "SET LOCAL quire.audit_retention = 'off'"}


def create_triggers_sql(vendor: str) -> list[str]:
    """Statements that create the triggers; running them again changes nothing."""
    return _GUARD[vendor]


def drop_triggers_sql(vendor: str) -> list[str]:
    """Statements that drop the triggers, for a test's database, which is emptied."""
    return _LIFT[vendor]


def guard_audit_log(using: str) -> None:
    """Create the triggers. Raises DatabaseError."""
    connection: BaseDatabaseWrapper = connections[using]
    with connection.cursor() as cursor:
        if TABLE in connection.introspection.table_names(cursor):
            for statement in create_triggers_sql(connection.vendor):
                cursor.execute(statement)


@contextmanager
def deletions_allowed(using: str) -> Iterator[None]:
    """A transaction that may delete audit rows, for the retention of the log alone."""
    connection = connections[using]
    with transaction.atomic(using=using), connection.cursor() as cursor:
        cursor.execute(_BEGIN[connection.vendor])
        yield
        cursor.execute(_END[connection.vendor])


SECRET_FIELDS = frozenset({"salt", "digest", "password"})
#: Client IP address of the current request; "" in commands and workers.
client_ip: ContextVar[str] = ContextVar("acting_from", default="")


def log_action(
    actor: Actor,
    action: str,
    target: models.Model,
    *,
    tenant: Tenant | None = None,
    **details: Any,
) -> AuditEntry:
    """Add an audit row in the transaction of the operation that it records.

    Raises:
        RuntimeError: there is no transaction, so the row could be committed alone.
        ValueError: `details` contains a secret.
    """
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError(f"{action}: its audit row must be in the same transaction.")
    if leaked := SECRET_FIELDS & {*details, *details.get("changes", ())}:
        raise ValueError(f"{action}: {', '.join(leaked)} must not be audited.")
    return AuditEntry.objects.create(
        actor=actor.user,
        actor_kind=actor.kind,
        actor_label=actor.label[:200],
        actor_key=actor.key,
        address=client_ip.get()[:45],
        tenant=tenant,
        action=action,
        target_type=target._meta.model_name or "",
        target_id=str(target.pk),
        target_label=str(target)[:250],
        details=details,
    )


@sync_and_async_middleware
def client_ip_middleware(get_response: Callable[[HttpRequest], Any]) -> Callable[..., Any]:
    """Middleware that records the client's address for `tenants.audit.log_action`."""

    async def in_loop(request: HttpRequest) -> Any:
        token = client_ip.set(request.META.get("REMOTE_ADDR") or "")
        try:
            return await get_response(request)
        finally:
            client_ip.reset(token)

    def in_thread(request: HttpRequest) -> Any:
        token = client_ip.set(request.META.get("REMOTE_ADDR") or "")
        try:
            return get_response(request)
        finally:
            client_ip.reset(token)

    return in_loop if iscoroutinefunction(get_response) else in_thread
