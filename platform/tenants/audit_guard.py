"""Triggers that keep the audit log as it was written, whoever talks to the database.

The model refuses changes in Python; these refuse what goes past it. They are made after every
`migrate`, because SQLite drops a table's triggers whenever Django rebuilds the table. Only the
log's own retention (`tenants.audit_retention`) may delete, in transactions that say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from tenants.models import AuditEntry

TABLE = AuditEntry._meta.db_table
SAYS = "Audit entries can neither be changed nor deleted."

_SQLITE = [
    (
        f"CREATE TRIGGER IF NOT EXISTS audit_no_{verb.lower()} BEFORE {verb} ON {TABLE} "
        f"BEGIN SELECT RAISE(ABORT, '{SAYS}'); END"
    )
    for verb in ("UPDATE", "DELETE")
]
_POSTGRESQL = [
    "CREATE OR REPLACE FUNCTION audit_stays() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN IF TG_OP = 'DELETE' AND current_setting('quire.audit_retention', true) = 'on' "
    f"THEN RETURN OLD; END IF; RAISE EXCEPTION '{SAYS}'; END $$",
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
#: Around deletions of one transaction. SQLite has no variables, but one writer at a time: nobody
#: else deletes while the trigger is away, and a transaction that fails brings it back.
_BEGIN = {
    "sqlite": "DROP TRIGGER audit_no_delete",
    "postgresql": "SET LOCAL quire.audit_retention = 'on'",
}
_END = {"sqlite": _SQLITE[1], "postgresql": "SET LOCAL quire.audit_retention = 'off'"}


def guards(vendor: str) -> list[str]:
    """Statements that set the triggers up; running them again changes nothing."""
    return _GUARD[vendor]


def lifts(vendor: str) -> list[str]:
    """Statements that take the triggers away: for a test's database, which is emptied."""
    return _LIFT[vendor]


def guard_audit_log(using: str) -> None:
    """Set the triggers up. Raises DatabaseError."""
    connection: BaseDatabaseWrapper = connections[using]
    with connection.cursor() as cursor:
        if TABLE in connection.introspection.table_names(cursor):
            for statement in guards(connection.vendor):
                cursor.execute(statement)


@contextmanager
def deletions_allowed(using: str) -> Iterator[None]:
    """A transaction that may delete audit rows, for the retention of the log alone."""
    connection = connections[using]
    with transaction.atomic(using=using), connection.cursor() as cursor:
        cursor.execute(_BEGIN[connection.vendor])
        yield
        cursor.execute(_END[connection.vendor])
