"""What every test may use: a real Redis, a database that threads can share, keys of its own."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import quarantine
from tests.services import running_redis

# Programs that tests start are compiled once, and not at each start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# OpenMP's threads spin while they wait for each other. Where several workers share a machine, they
# take the processor from those they wait for: two seconds of three in some files.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Triton's interpreter must be asked for before a kernel is defined, and collecting tests of GPUs
# defines some. Nothing else here uses Triton.
os.environ.setdefault("TRITON_INTERPRET", "1")
# For each tiny checkpoint transformers would start four threads, and wait for them.
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")

#: A test's tier follows from the fixtures that it uses, directly or through others. One that starts
#: programs by itself has the mark `service` or `system` in its file.
SERVICE_FIXTURES = {"redis_url", "redis_server_url", "adapter_store"}
SYSTEM_FIXTURES = {"browser", "product", "seeded", "site", "watched"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by tier, and those in quarantine as flaky."""
    flaky = quarantine.read()
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & SYSTEM_FIXTURES:
            item.add_marker(pytest.mark.system)
        elif fixtures & SERVICE_FIXTURES:
            item.add_marker(pytest.mark.service)
        if item.nodeid in flaky:
            item.add_marker(pytest.mark.flaky)


def pytest_collection_finish() -> None:
    """Modules and collected tests stay: the garbage collector need not visit them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def short_tmp() -> Iterator[Path]:
    """A folder with a short path, as a Unix socket needs it."""
    folder = Path(tempfile.mkdtemp(prefix="q-", dir="/tmp"))
    folder.chmod(0o755)  # PostgreSQL may have to run as another user
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def redis_url(short_tmp: Path) -> Iterator[str]:
    """A real Redis (or Valkey) for the whole session; tests use prefixes of their own."""
    with running_redis(short_tmp / "redis") as url:
        yield url


@pytest.fixture(autouse=True)
def _cheap_settings(settings: Any) -> None:
    """Users are made by the dozen; a hash that is slow on purpose would cost seconds. What is
    counted in the cache, such as wrong passwords, starts at nothing in each test.
    """
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    backend = "django.core.cache.backends.locmem.LocMemCache"
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": uuid.uuid4().hex}}
    # Each client loads the middleware, which would stat every static file.
    settings.SERVESTATIC_USE_FINDERS = False


@pytest.fixture
def key_prefix() -> str:
    """A prefix that no other test uses."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
def live_redis(redis_url: str, key_prefix: str, settings: Any) -> str:
    """`settings` that point to the real Redis under a fresh prefix; returns the URL."""
    settings.REDIS_URL = redis_url
    settings.QUIRE = settings.QUIRE.replace(key_prefix=key_prefix)
    return redis_url


#: What a migration writes and no test changes. To write it anew takes longer than most tests.
PERMANENT_TABLES = {"django_content_type", "auth_permission"}
#: What is looked at when a transaction ends is looked at now: a table with something left to look
#: at gets no trigger.
DUE = "SET CONSTRAINTS ALL IMMEDIATE"


@pytest.fixture(scope="session", autouse=True)
def _tables_may_be_emptied() -> Iterator[None]:
    """Between tests that commit, tables are emptied; the audit log forbids that to all."""
    from django.core.management.commands import flush
    from django.db import connection

    from tenants.audit import create_triggers_sql, drop_triggers_sql

    baseline, vendor = connection.ops.sql_flush, connection.vendor

    def sql_flush(style: Any, tables: list[str], **kwargs: Any) -> list[str]:
        emptied = [table for table in tables if table not in PERMANENT_TABLES]
        if vendor == "postgresql":  # to truncate them makes new files for each, and takes its time
            deletes = [f"DELETE FROM {connection.ops.quote_name(table)}" for table in emptied]
            # Keys that lead elsewhere are looked at when the last table is empty.
            return [
                *drop_triggers_sql(vendor),
                "; ".join([*deletes, DUE]),
                *create_triggers_sql(vendor),
            ]
        return [
            *drop_triggers_sql(vendor),
            *baseline(style, emptied, **kwargs),
            *create_triggers_sql(vendor),
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection.ops, "sql_flush", sql_flush)
        patch.setattr(flush, "emit_post_migrate_signal", lambda *args, **kwargs: None)
        yield


@pytest.fixture(scope="session")
def django_db_modify_db_settings(tmp_path_factory: pytest.TempPathFactory) -> None:
    """SQLite in a file: one in memory can't be locked or shared between threads as in real life."""
    from django.conf import settings

    default = settings.DATABASES["default"]
    if default["ENGINE"].endswith("sqlite3"):
        path = tmp_path_factory.mktemp("database") / "test.sqlite3"
        default.setdefault("TEST", {})["NAME"] = str(path)
        default["OPTIONS"]["init_command"] += "; PRAGMA synchronous=OFF"
    else:
        # A pool would still hold connections when the test database is to be dropped.
        default["OPTIONS"].pop("pool", None)


@pytest.fixture
def adapter_store(tmp_path: Path, settings: Any) -> Iterator[Path]:
    """Adapters in a folder of the test's own, a program that stands in for the engine's check, and
    no workers: tests do their work. Gives the folder that adapters may be loaded from.
    """
    from adapters import cards

    settings.QUIRE = settings.QUIRE.replace(
        storage_dir=tmp_path,
        adapter_dirs=[tmp_path / "allowed"],
        adapter_check_command=[sys.executable, "-m", "tests.fakes.adapter_check"],
        celery_app="tests.fakes.no_celery.application",
    )
    cards.forget()
    yield tmp_path / "allowed"
    cards.forget()
