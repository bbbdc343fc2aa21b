"""Comparing the ledger with the token counts of the engine's replicas."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import msgspec
import redis
from django.conf import settings
from django.db import connections, router, transaction
from django.db.models import Count, Sum, Value
from django.db.models.functions import Coalesce, TruncHour

from engine.contract.redis_keys import written_tokens_key
from metering.models import SUM_FIELDS, UsageDay, UsageEntry, UsageHour
from metering.open_requests import gateways_key, open_key
from metering.settlement import SUMS as REDIS_SUMS
from metering.settlement import parse_usage_field, reconciliation_start_key, spool_key, sums_key
from metering.usage_record import UsageRecord, decode_record
from tenants.models import Tenant

# Sums are updated in the transaction that writes the ledger, so they should match. A restored
# backup or a manual change can break that unnoticed, so workers verify them daily.

logger = logging.getLogger(__name__)

#: Number of days that workers verify, including today.
DAYS = 3
_OF = ("tenant_id", "model", "adapter", "key_id", "user_id", "endpoint")

Rows = dict[tuple[Any, ...], tuple[int, ...]]


def verify_rollups(days: int = DAYS, now: datetime | None = None) -> list[datetime]:
    """Verify and repair the sums of the last days; returns the days that differed."""
    today = (now or datetime.now(UTC)).astimezone(UTC)
    today = today.replace(hour=0, minute=0, second=0, microsecond=0)
    return [
        day for day in (today - timedelta(days=back) for back in range(days)) if not check_day(day)
    ]


def check_day(day: datetime) -> bool:
    """Whether a day's sums (UTC) match its ledger; if not they are repaired.

    Sums of tenants whose ledger no longer covers the day are left alone.
    """
    using = router.db_for_write(UsageDay)
    with transaction.atomic(using):
        if connections[using].vendor == "postgresql":
            # Blocks the ledger's writers, which update these sums; SQLite has one writer anyway.
            with connections[using].cursor() as cursor:
                for table in (UsageHour, UsageDay):
                    name = table._meta.db_table
                    cursor.execute(f"LOCK TABLE {name} IN SHARE ROW EXCLUSIVE MODE")
        tenants = _tenants_with_full_ledger(day)
        entries = _ledger(day, tenants)
        hours, days = (_repair(table, day, entries, tenants) for table in (UsageHour, UsageDay))
        return hours and days


def _tenants_with_full_ledger(day: datetime) -> list[int]:
    """Tenants whose ledger still covers the day."""
    age = timedelta(days=1)
    retention_days = Tenant.objects.values_list("pk", "keep_usage_days")
    now = datetime.now(UTC)
    return [
        pk for pk, days in retention_days if days is None or day > now - timedelta(days=days) + age
    ]


def _ledger(day: datetime, tenants: list[int]) -> Rows:
    """The day's sums by hour, computed from the ledger."""
    rows = (
        UsageEntry.objects.filter(
            started_at__gte=day, started_at__lt=day + timedelta(days=1), tenant__in=tenants
        )
        .order_by()
        .annotate(
            hour=TruncHour("started_at", tzinfo=UTC),
            key_id=Coalesce("api_key_id", Value(0)),
            person=Coalesce("user_id", Value(0)),
        )
        .values_list("hour", "tenant_id", "model", "adapter", "key_id", "person", "endpoint")
        .annotate(Count("pk"), *(Sum(name) for name in SUM_FIELDS[1:]))
    )
    width = 1 + len(_OF)
    return {row[:width]: row[width:] for row in rows}


def _repair(table: Any, day: datetime, entries: Rows, tenants: list[int]) -> bool:
    """Correct a table's rows of the day; returns whether they were right already."""
    expected: Rows = {}
    for (hour, *of), amounts in entries.items():
        key = (hour if table is UsageHour else day, *of)
        previous_sums = expected.get(key, (0,) * len(SUM_FIELDS))
        expected[key] = tuple(a + b for a, b in zip(previous_sums, amounts, strict=True))
    rows = table.objects.filter(
        start__gte=day, start__lt=day + timedelta(days=1), tenant__in=tenants
    )
    width = 1 + len(_OF)
    current = {row[:width]: row[width:] for row in rows.values_list("start", *_OF, *SUM_FIELDS)}
    if current == expected:
        return True
    logger.error(
        "%s of %s was not the ledger's: %d sums are made anew",
        table.__name__,
        day.date(),
        len(expected),
    )
    rows.delete()
    table.objects.bulk_create(
        [
            table(**dict(zip(("start", *_OF, *SUM_FIELDS), (*of, *amounts), strict=True)))
            for of, amounts in expected.items()
        ],
        batch_size=60,
    )
    return False


#: Days after which replicas' sums are deleted; no ledger is retained for less.
MAX_DAYS = 35
#: Number of comparisons: requests are in transit meanwhile, so only lasting differences count.
SNAPSHOT_ATTEMPTS, PAUSE_S = 3, 1.0
#: Maximum number of ids per query.
PART = 500
#: A request's id without the suffixes of the engine and of a second gateway.
_SUFFIX = re.compile(r"(-\d+)?(\.\d+)?$")


@dataclass
class ReconciliationRow:
    """Tokens of one tenant and model: [prompt, output]."""

    tenant: str
    model: str
    engine: list[int] = field(default_factory=lambda: [0, 0])
    unbilled: list[int] = field(default_factory=lambda: [0, 0])
    ledger: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def difference(self) -> list[int]:
        """The ledger's excess over Redis's sums."""
        parts = zip(self.ledger, self.unbilled, self.engine, strict=True)
        return [ledger + unbilled - engine for ledger, unbilled, engine in parts]


@dataclass
class Reconciliation:
    """The result of a comparison.

    Attributes:
        since: requests that arrived from then on are compared; None: no gateway has run yet.
        running: number of unsettled requests. lost: ids of those that no gateway will settle.
    """

    since: datetime | None
    lines: list[ReconciliationRow]
    running: int = 0
    lost: list[str] = field(default_factory=list)

    @property
    def is_balanced(self) -> bool:
        """Whether nothing differs."""
        return not self.lost and not any(any(line.difference) for line in self.lines)


def reconcile(
    client: redis.Redis, days: int = 2, attempts: int = SNAPSHOT_ATTEMPTS
) -> Reconciliation:
    """Compare the last days, including today. May block."""
    result = _snapshot(client, days)
    for _ in range(attempts - 1):
        if result.is_balanced:
            break
        time.sleep(PAUSE_S)
        again = _snapshot(client, days)
        again.lost = [name for name in again.lost if name in set(result.lost)]
        result = again
    return result


def prune_counters(client: redis.Redis, lost: Iterable[str] = ()) -> None:
    """Delete sums that are too old to compare or of an erased tenant, and lost requests."""
    oldest = f"{datetime.now(UTC) - timedelta(days=MAX_DAYS + 5):%Y-%m-%d}"
    erased = set(Tenant.objects.exclude(erased_at=None).values_list("pk", flat=True))
    old = []
    for name in (name.decode() for name in cast("list[bytes]", client.hkeys(sums_key()))):
        day, tenant_id, _, _ = parse_usage_field(name)
        if day < oldest or tenant_id in erased:
            old.append(name)
    if old:
        client.hdel(sums_key(), *old)
    written = written_tokens_key(settings.QUIRE.key_prefix)
    lost_requests = set(lost)
    fields = cast("list[bytes]", client.hkeys(written))
    if lost_fields := [field for field in fields if _request_of(field) in lost_requests]:
        client.hdel(written, *lost_fields)


def _snapshot(client: redis.Redis, days: int) -> Reconciliation:
    pipe = client.pipeline(transaction=True)
    pipe.get(reconciliation_start_key())
    pipe.hgetall(sums_key())
    pipe.xrange(spool_key())
    began, sums, spooled = pipe.execute()
    if began is None:
        return Reconciliation(None, [])
    now = datetime.now(UTC)
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    since = max(datetime.fromtimestamp(int(began), UTC), midnight - timedelta(days=days - 1))
    lines: dict[tuple[int, str], ReconciliationRow] = {}
    # The ledger has nothing of an erased tenant any more.
    slugs = dict(Tenant.objects.filter(erased_at=None).values_list("pk", "slug"))

    def line(tenant_id: int, model: str) -> ReconciliationRow:
        if (tenant_id, model) not in lines:
            lines[tenant_id, model] = ReconciliationRow(slugs.get(tenant_id, ""), model)
        return lines[tenant_id, model]

    for name, count in sums.items():
        day, tenant_id, what, model = parse_usage_field(name.decode())
        if day >= f"{since:%Y-%m-%d}":
            kind, unbilled = divmod(REDIS_SUMS.index(what), 2)
            of = line(tenant_id, model)
            (of.unbilled if unbilled else of.engine)[kind] += int(count)
    waiting = {record.request_id: record for record in _records(spooled)}
    for tenant_id, model, prompt, output in _ledger_sums(since, now, waiting):
        ledger = line(tenant_id, model).ledger
        ledger[0] += prompt
        ledger[1] += output
    ordered = [lines[key] for key in sorted(lines) if key[0] in slugs]
    running, lost = _count_open_requests(client, set(waiting))
    return Reconciliation(since, ordered, running, lost)


def _records(entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> Iterator[UsageRecord]:
    for _, fields in entries:
        try:
            yield decode_record(fields[b"r"])
        except (msgspec.DecodeError, msgspec.ValidationError, KeyError):
            continue  # the drainer moves it to the dead letters


def _ledger_sums(
    since: datetime, until: datetime, waiting: dict[str, UsageRecord]
) -> Iterator[tuple[int, str, int, int]]:
    """(tenant, model, prompt, output) of ledger and spool up to a moment, each request once.

    A spooled record may be in the ledger already, or have been there before and not acknowledged.
    """
    rows = UsageEntry.objects.filter(started_at__gte=since, recorded_at__lte=until)
    sums = rows.order_by().values_list("tenant_id", "model")
    yield from sums.annotate(Sum("prompt_tokens"), Sum("completion_tokens"))
    ledger_ids: set[str] = set()
    for part in _parts(waiting):
        ledger_ids.update(rows.filter(request_id__in=part).values_list("request_id", flat=True))
    for name, record in waiting.items():
        started: Any = record.started_at
        if name not in ledger_ids and started >= since:
            yield record.tenant_id, record.model, record.prompt_tokens, record.completion_tokens


def _count_open_requests(client: redis.Redis, waiting: set[str]) -> tuple[int, list[str]]:
    """Return the number of running requests and the lost ones, from the engine's open counts.

    Counts of requests settled before the abort reached the engine are deleted here.
    """
    written = written_tokens_key(settings.QUIRE.key_prefix)
    fields = cast("list[bytes]", client.hkeys(written))
    names = {_request_of(name) for name in fields}
    running: set[str] = set()
    for gateway in cast("list[bytes]", client.zrange(gateways_key(), 0, -1)):
        open_requests = cast("list[bytes]", client.hkeys(open_key(gateway.decode())))
        running.update(_SUFFIX.sub("", name.decode()) for name in open_requests)
    settled = names & waiting
    for part in _parts(names - running - waiting):
        entries = UsageEntry.objects.filter(request_id__in=part)
        settled.update(entries.values_list("request_id", flat=True))
    if late := [name for name in fields if _request_of(name) in settled - running]:
        client.hdel(written, *late)
    return len(names & running), sorted(names - running - settled)


def _request_of(name: bytes) -> str:
    return _SUFFIX.sub("", name.decode().rpartition("/")[0])


def _parts(values: Iterable[str]) -> Iterator[list[str]]:
    ordered = list(values)
    return (ordered[start : start + PART] for start in range(0, len(ordered), PART))
