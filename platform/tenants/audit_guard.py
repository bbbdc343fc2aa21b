"""Triggers that keep the audit log as it was written, whoever talks to the database.

The model refuses changes in Python; these refuse what goes past it. They are made after every
`migrate`, because SQLite drops a table's triggers whenever Django rebuilds the table.
"""

from __future__ import annotations

from django.db import connections
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
    f"$$ BEGIN RAISE EXCEPTION '{SAYS}'; END $$",
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
