"""How long reports take over a large ledger.

python -m tests.platform.bench.usage_reports [--rows 10000000] [--database URL] [--keep FOLDER]

Without `--database` on SQLite in a temporary folder, else on that (empty) PostgreSQL. The ledger
covers 90 days, 50 tenants with 4 keys each and 3 models. With `--keep` what was filled stays in
that folder (on SQLite) or database, and is asked again by the next run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "platform")]

TENANTS, KEYS, MODELS, DAYS = 50, 4, 3, 90
START = datetime(2026, 1, 1, tzinfo=UTC)
COLUMNS = (
    "request_id, tenant_id, api_key_id, endpoint, model, prompt_tokens, cached_tokens, "
    "completion_tokens, cost_nanos, finish_reason, status, started_at, duration_ms, stream, "
    "recorded_at, adapter, adapter_digest, in_place_of, image_tokens"
)


def fill(rows: int) -> None:
    """The ledger in one statement, then its sums."""
    from django.db import connection

    sqlite = connection.vendor == "sqlite"
    step = DAYS * 86400 / rows
    timestamp = (
        f"datetime('2026-01-01', (n * {step}) || ' seconds')"
        if sqlite
        else f"timestamptz '2026-01-01 00:00Z' + n * {step} * interval '1 second'"
    )
    numbers = (
        f"(WITH RECURSIVE c(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM c WHERE n < {rows - 1}) "
        "SELECT n FROM c) AS numbers"
        if sqlite
        else f"generate_series(0, {rows - 1}) AS numbers(n)"
    )
    with connection.cursor() as cursor, without_indexes(cursor):
        cursor.execute(
            f"INSERT INTO metering_usageentry ({COLUMNS}) "
            f"SELECT 'r' || n, 1 + (n * 7) % {TENANTS}, 1 + (n * 13) % {TENANTS * KEYS}, "
            f"'chat.completions', 'model-' || (n % {MODELS}), 100 + n % 900, n % 100, n % 500, "
            f"n % 1000, 'stop', 200, {timestamp}, 1.0, {'0' if sqlite else 'false'}, "
            f"{timestamp}, '', '', '', 0 "
            f"FROM {numbers}"
        )
        for table, sqlites, postgresqls in (
            ("metering_usagehour", "substr(started_at, 1, 13) || ':00:00'", "hour"),
            ("metering_usageday", "substr(started_at, 1, 10) || ' 00:00:00'", "day"),
        ):
            start = sqlites if sqlite else f"date_trunc('{postgresqls}', started_at)"
            cursor.execute(
                f"INSERT INTO {table} (tenant_id, start, model, adapter, key_id, user_id, "
                "endpoint, requests, prompt_tokens, cached_tokens, completion_tokens, cost_nanos) "
                f"SELECT tenant_id, {start}, model, '', api_key_id, 0, endpoint, count(*), "
                "sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens), sum(cost_nanos) "
                f"FROM metering_usageentry GROUP BY tenant_id, {start}, model, api_key_id, endpoint"
            )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")


@contextmanager
def without_indexes(cursor: Any) -> Iterator[None]:
    """Rows by the million are written first and put in order then. Nothing outlives a crash."""
    from django.db import connection

    tables = "('metering_usageentry', 'metering_usagehour', 'metering_usageday')"
    if connection.vendor == "sqlite":
        for word in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-1000000"):
            cursor.execute(f"PRAGMA {word}")
        cursor.execute("PRAGMA temp_store=MEMORY")
        cursor.execute(
            "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL "
            f"AND tbl_name IN {tables}"
        )
    else:
        cursor.execute("SET session_replication_role = replica")  # no look at foreign keys
        cursor.execute("SET maintenance_work_mem = '1GB'; SET work_mem = '512MB'")
        cursor.execute(
            f"SELECT indexname, indexdef FROM pg_indexes WHERE tablename IN {tables} "
            "AND indexname NOT IN (SELECT conname FROM pg_constraint)"
        )
    indexes = cursor.fetchall()
    for name, _ in indexes:
        cursor.execute(f'DROP INDEX "{name}"')
    yield
    for _, definition in indexes:
        cursor.execute(definition)


def best_of(count: int, work: Callable[[], object]) -> tuple[float, float, float]:
    """Seconds of the first and of the fastest run, and the fastest's CPU time."""
    timings = []
    for _ in range(count):
        began, worked = time.perf_counter(), time.process_time()
        work()
        timings.append((time.perf_counter() - began, time.process_time() - worked))
    return timings[0][0], *min(timings)


#: Everything that a report may be grouped by, and nothing, and all at once.
GROUPS: list[tuple[str, ...]] = [
    (),
    *((name,) for name in ("project_id", "user_id", "api_key_id", "model", "adapter")),
    ("project_id", "model"),
    ("project_id", "user_id", "api_key_id", "model", "adapter"),
]
#: Reports at their longest, as the API's `limit` allows: name -> width and days. Of each the first
#: page is read, as the API does.
LONGEST = {"31 days by day": ("1d", 31), "168 hours by hour": ("1h", 7)}
LONGEST |= {"60 minutes by minute": ("1m", 1 / 24), "1440 minutes by minute": ("1m", 1)}


def measure() -> None:
    """One line a question."""
    from metering.access import UsageQuery, access_all_usage, access_usage, first_page, report
    from tenants.models import Tenant, User

    tenant = Tenant.objects.get(slug="t1")
    person = User.objects.filter(username="bench").first() or User.objects.create_superuser(
        "bench", "bench@example.org", "a long password"
    )
    last = START + timedelta(days=DAYS)
    day = last.date()
    fortnight = {"first": day - timedelta(days=14), "last": day}
    show("overview, 14 days of a tenant", lambda: access_usage(person, tenant, **fortnight))
    show("overview, 14 days of all", lambda: access_all_usage(person, **fortnight))
    for name, (width, days) in LONGEST.items():
        for who, tenants in (("a tenant", [tenant.pk]), ("all tenants", None)):
            for groups in GROUPS:
                question = UsageQuery(
                    start=last - timedelta(days=days),
                    end=last,
                    width=width,
                    group_by=groups,
                    tenants=tenants,
                )
                show(
                    f"{who}, {name}, {'+'.join(groups) or 'sums'}",
                    lambda q=question: report(first_page(q)),
                )

    for days in (30, DAYS):
        for groups in GROUPS:
            question = UsageQuery(
                start=last - timedelta(days=days), end=last, width="1d", group_by=groups
            )
            show(
                f"page of all tenants, {days} days, {'+'.join(groups) or 'sums'}",
                lambda q=question: report(first_page(q, total=True), total=True),
            )


def show(name: str, work: Callable[[], Any]) -> None:
    """One line."""
    first, best, cpu = (1000 * seconds for seconds in best_of(5, work))
    rows = len(work())
    print(f"{name:95} first {first:7.1f} ms  best {best:7.1f} ms (CPU {cpu:6.1f})  {rows:6} rows")


def main() -> None:
    """Fill and ask."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--database", default="", metavar="URL")
    parser.add_argument("--keep", default="", metavar="FOLDER")
    args = parser.parse_args()
    with nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "QUIRE_DATA_DIR": folder,
            "DATABASE_URL": args.database,
            "DJANGO_SETTINGS_MODULE": "config.settings",
        }
        import django

        django.setup()
        from django.core.management import call_command
        from django.db import connection

        from metering.models import UsageEntry

        call_command("migrate", verbosity=0)
        if not UsageEntry.objects.exists():
            begin(args.rows)
        measure()
        connection.close()


def begin(rows: int) -> None:
    """Tenants, keys and so many rows of the ledger."""
    from django.db import connection

    from tenants import actions
    from tenants.actors import SYSTEM_ACTOR

    for number in range(TENANTS):
        tenant = actions.create_tenant(actor=SYSTEM_ACTOR, name=f"T{number}", slug=f"t{number}")
        for _ in range(KEYS):
            actions.create_key(actor=SYSTEM_ACTOR, tenant=tenant)
    began = time.perf_counter()
    fill(rows)
    print(f"{rows:,} rows on {connection.vendor} in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
