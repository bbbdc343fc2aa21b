"""Whether the sums by hour and day are the ledger's, and making them so again.

They are added to in the transaction that writes the ledger, so they always should be. But a
restored backup, or a hand in the database, can part them, and nobody would see it: workers look
every day.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connections, router, transaction
from django.db.models import Count, Sum, Value
from django.db.models.functions import Coalesce, TruncHour

from metering.models import UsageDay, UsageEntry, UsageHour
from metering.models.roll_up import SUMS
from tenants.models import Tenant

logger = logging.getLogger(__name__)

#: Days back that workers look at, today among them.
DAYS = 3
_OF = ("tenant_id", "model", "adapter", "key_id", "user_id", "endpoint")

Rows = dict[tuple[Any, ...], tuple[int, ...]]


def check_days(days: int = DAYS, now: datetime | None = None) -> list[datetime]:
    """Look at the last days and mend what differs; the days that did."""
    today = (now or datetime.now(UTC)).astimezone(UTC)
    today = today.replace(hour=0, minute=0, second=0, microsecond=0)
    return [
        day for day in (today - timedelta(days=back) for back in range(days)) if not check_day(day)
    ]


def check_day(day: datetime) -> bool:
    """Whether a day's sums (UTC) are its ledger's; if not they are now.

    Sums of tenants whose ledger no longer holds all of the day are left alone.
    """
    using = router.db_for_write(UsageDay)
    with transaction.atomic(using):
        if connections[using].vendor == "postgresql":
            # Who writes into the ledger waits with its sums; SQLite has one writer anyway.
            with connections[using].cursor() as cursor:
                for table in (UsageHour, UsageDay):
                    name = table._meta.db_table
                    cursor.execute(f"LOCK TABLE {name} IN SHARE ROW EXCLUSIVE MODE")
        kept = _whole(day)
        entries = _ledger(day, kept)
        hours, days = (_mend(table, day, entries, kept) for table in (UsageHour, UsageDay))
        return hours and days


def _whole(day: datetime) -> list[int]:
    """Tenants of whom the ledger still has all of the day."""
    age = timedelta(days=1)
    kept = Tenant.objects.values_list("pk", "keep_usage_days")
    now = datetime.now(UTC)
    return [pk for pk, days in kept if days is None or day > now - timedelta(days=days) + age]


def _ledger(day: datetime, tenants: list[int]) -> Rows:
    """The day's sums by hour, from single requests."""
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
        .annotate(Count("pk"), *(Sum(name) for name in SUMS[1:]))
    )
    width = 1 + len(_OF)
    return {row[:width]: row[width:] for row in rows}


def _mend(table: Any, day: datetime, entries: Rows, tenants: list[int]) -> bool:
    """Make a table's rows of the day what they should be; whether they were."""
    wanted: Rows = {}
    for (hour, *of), amounts in entries.items():
        place = (hour if table is UsageHour else day, *of)
        before = wanted.get(place, (0,) * len(SUMS))
        wanted[place] = tuple(a + b for a, b in zip(before, amounts, strict=True))
    rows = table.objects.filter(
        start__gte=day, start__lt=day + timedelta(days=1), tenant__in=tenants
    )
    width = 1 + len(_OF)
    found = {row[:width]: row[width:] for row in rows.values_list("start", *_OF, *SUMS)}
    if found == wanted:
        return True
    logger.error(
        "%s of %s was not the ledger's: %d sums are made anew",
        table.__name__,
        day.date(),
        len(wanted),
    )
    rows.delete()
    table.objects.bulk_create(
        [
            table(**dict(zip(("start", *_OF, *SUMS), (*of, *amounts), strict=True)))
            for of, amounts in wanted.items()
        ],
        batch_size=60,
    )
    return False
