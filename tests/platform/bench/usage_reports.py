"""How long reports take over a large ledger.

python -m tests.platform.bench.usage_reports [--rows 10000000] [--database URL]

Without `--database` on SQLite in a temporary folder, else on that (empty) PostgreSQL. The ledger
covers 90 days, 50 tenants with 4 keys each and 3 models.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    "recorded_at, adapter, adapter_digest, in_place_of"
)


def fill(rows: int) -> None:
    """The ledger in one statement, then its sums."""
    from django.db import connection

    sqlite = connection.vendor == "sqlite"
    step = DAYS * 86400 / rows
    at = (
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
            f"n % 1000, 'stop', 200, {at}, 1.0, {'0' if sqlite else 'false'}, {at}, '', '', '' "
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

    if connection.vendor != "sqlite":
        yield
        return
    for word in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-1000000", "temp_store=MEMORY"):
        cursor.execute(f"PRAGMA {word}")
    cursor.execute(
        "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL "
        "AND tbl_name IN ('metering_usageentry', 'metering_usagehour', 'metering_usageday')"
    )
    indexes = cursor.fetchall()
    for name, _ in indexes:
        cursor.execute(f'DROP INDEX "{name}"')
    yield
    for _, made in indexes:
        cursor.execute(made)


def best_of(count: int, work: Callable[[], object]) -> tuple[float, float, float]:
    """Seconds of the first and of the fastest run, and the fastest's CPU time."""
    taken = []
    for _ in range(count):
        began, worked = time.perf_counter(), time.process_time()
        work()
        taken.append((time.perf_counter() - began, time.process_time() - worked))
    return taken[0][0], *min(taken)


def measure() -> None:
    """One line a question."""
    from metering.access import Question, access_usage, report
    from tenants.models import Tenant, User

    tenant = Tenant.objects.get(slug="t1")
    person = User.objects.create_superuser("bench", "bench@example.org", "a long password")
    last = START + timedelta(days=DAYS)
    groups = ("project_id", "api_key_id", "model")

    def asked(width: str, days: float, tenants: list[int] | None) -> Callable[[], object]:
        start = last - timedelta(days=days)
        question = Question(start=start, end=last, width=width, group_by=groups, tenants=tenants)
        return lambda: report(question)

    day = last.date()
    questions = {
        "overview, 14 days of a tenant": lambda: access_usage(
            person, tenant, first=day - timedelta(days=14), last=day
        ),
        "a tenant, 31 days by day": asked("1d", 31, [tenant.pk]),
        "a tenant, 168 hours by hour": asked("1h", 7, [tenant.pk]),
        "a tenant, 60 minutes by minute": asked("1m", 1 / 24, [tenant.pk]),
        "a tenant, 1440 minutes by minute": asked("1m", 1, [tenant.pk]),
        "all tenants, 31 days by day": asked("1d", 31, None),
        "all tenants, 24 hours by hour": asked("1h", 1, None),
        "all tenants, 60 minutes by minute": asked("1m", 1 / 24, None),
    }
    for name, work in questions.items():
        first, best, cpu = (1000 * seconds for seconds in best_of(7, work))
        print(f"{name:34} first {first:8.1f} ms   best of 7 {best:8.1f} ms (CPU {cpu:.1f})")


def main() -> None:
    """Fill and ask."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--database", default="", metavar="URL")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "QUIRE_DATA_DIR": folder,
            "DATABASE_URL": args.database,
            "DJANGO_SETTINGS_MODULE": "config.settings",
        }
        import django

        django.setup()
        from django.core.management import call_command
        from django.db import connection

        from tenants import actions
        from tenants.actors import SYSTEM

        call_command("migrate", verbosity=0)
        for number in range(TENANTS):
            tenant = actions.create_tenant(actor=SYSTEM, name=f"T{number}", slug=f"t{number}")
            for _ in range(KEYS):
                actions.create_key(actor=SYSTEM, tenant=tenant)
        began = time.perf_counter()
        fill(args.rows)
        print(f"{args.rows:,} rows on {connection.vendor} in {time.perf_counter() - began:.0f} s")
        measure()
        connection.close()


if __name__ == "__main__":
    main()
