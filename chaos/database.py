"""The instance's database: an SQLite file, or a temporary PostgreSQL server that can be stopped."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import closing
from pathlib import Path
from typing import Any

from catalog.processes import ManagedProcess, spawn

#: Where Debian's packages install the programs, by version.
PROGRAMS = "/usr/lib/postgresql"
START_TIMEOUT_S = 20.0
Rows = list[tuple[Any, ...]]


class NoDatabase(RuntimeError):
    """PostgreSQL is missing or doesn't start; the message says why."""


class Database(ABC):
    """The instance's database. `why_not`: why it can't be stopped; "" if it can."""

    why_not = ""
    environment: dict[str, str]

    @abstractmethod
    def rows(self, query: str) -> Rows:
        """Return the rows of a query."""

    @abstractmethod
    def stop(self) -> None:
        """Stop it immediately, as if its machine had failed."""

    @abstractmethod
    def start(self) -> None:
        """Start it again."""

    @abstractmethod
    def close(self) -> None:
        """Stop it and delete its data."""


class File(Database):
    """SQLite in the data folder, as `manage.py up` creates it."""

    why_not = "the database is a file here; with --postgresql it's a server"

    def __init__(self, data_dir: Path) -> None:
        self.environment = {}
        self._address = f"file:{data_dir / 'quire.sqlite3'}?mode=ro"

    def rows(self, query: str) -> Rows:
        with closing(sqlite3.connect(self._address, uri=True, timeout=30)) as database:
            return list(database.execute(query))

    def stop(self) -> None:
        raise NoDatabase(self.why_not)

    def start(self) -> None:
        raise NoDatabase(self.why_not)

    def close(self) -> None:
        """Do nothing: the instance deletes its data folder."""


class PostgreSQL(Database):
    """A cluster in a temporary folder that listens on a Unix socket alone.

    PostgreSQL refuses to run as root; then it runs as the `postgres` user. Raises `NoDatabase`.
    """

    def __init__(self) -> None:
        programs = sorted(Path(PROGRAMS).glob("*/bin/initdb"))
        if not programs:
            raise NoDatabase(f"PostgreSQL's programs aren't in {PROGRAMS}.")
        self._programs = programs[-1].parent
        self._user = "postgres" if os.geteuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="quire-chaos-db-"))
        self._server: ManagedProcess | None = None
        try:
            self._make()
            self.start()
        except BaseException:
            self.close()
            raise
        self.url = f"postgres://quire@{str(self._folder).replace('/', '%2F')}/postgres"
        self.environment = {"DATABASE_URL": self.url}

    def _make(self) -> None:
        if self._user:
            shutil.chown(self._folder, self._user)
        command = [str(self._programs / "initdb"), "-D", str(self._data), "-U", "quire"]
        result = subprocess.run(
            [*command, "-A", "trust", "-E", "UTF8"],
            capture_output=True,
            text=True,
            check=False,
            user=self._user,
            cwd="/",
        )
        if result.returncode:
            raise NoDatabase(f"initdb: {result.stderr.strip()}")

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def start(self) -> None:
        as_user = ["setpriv", f"--reuid={self._user}", f"--regid={self._user}", "--init-groups"]
        self._server = spawn(
            [
                *(as_user if self._user else []),
                *(str(self._programs / "postgres"), "-D", str(self._data)),
                *("-k", str(self._folder), "-c", "listen_addresses="),
            ],
            name="postgresql",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        ready = [str(self._programs / "pg_isready"), "-q", "-h", str(self._folder), "-U", "quire"]
        deadline = time.monotonic() + START_TIMEOUT_S
        while subprocess.run([*ready, "-d", "postgres"], check=False).returncode:
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise NoDatabase(f"PostgreSQL doesn't answer after {START_TIMEOUT_S:.0f} s.")
            time.sleep(0.05)

    def stop(self) -> None:
        if self._server is not None:
            self._server.kill()
            (self._data / "postmaster.pid").unlink(missing_ok=True)

    def rows(self, query: str) -> Rows:
        import psycopg

        with psycopg.connect(self.url) as database:
            return database.execute(query).fetchall()

    def close(self) -> None:
        if self._server is not None:
            self._server.stop(grace=10)
        shutil.rmtree(self._folder, ignore_errors=True)
