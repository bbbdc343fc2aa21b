"""Usage by minute, hour or day, grouped, for the API's reports and the console."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connections
from django.db.models import (
    Aggregate,
    BigIntegerField,
    Count,
    Func,
    QuerySet,
    Sum,
    TextField,
    Value,
)
from django.db.models.functions import Coalesce

from common.errors import NotFound
from metering.models import SUM_FIELDS, UsageDay, UsageEntry, UsageHour
from tenants.api_keys import OPERATOR
from tenants.authentication import Caller
from tenants.models import ApiKey, Tenant

WIDTHS = {"1m": timedelta(minutes=1), "1h": timedelta(hours=1), "1d": timedelta(days=1)}
#: Endpoints of pooling requests; all others generate.
POOLING = ("embeddings", "pooling", "classify", "score", "rerank")

#: Maximum number of ids per query, within SQLite's limit.
MAX_IDS = 10_000

#: Grouping name -> its column.
_COLUMNS = {"project_id": "tenant_id", "user_id": "user_id", "api_key_id": "key_id"}
_COLUMNS |= {"model": "model", "line_item": "model", "endpoint": "endpoint"}
_COLUMNS |= {"adapter": "adapter"}


@dataclass(frozen=True, kw_only=True)
class UsageQuery:
    """A usage report's query.

    Attributes:
        start, end: aware; `start` is included and lies on a bucket's beginning, `end` is excluded.
        width: of `WIDTHS`.
        group_by: of "project_id", "user_id", "api_key_id", "model" (or "line_item"), "adapter",
            "endpoint".
        tenants: ids to include; None for all.
        users, keys, models: restrict to these; empty for all. `keys` are public ids.
        pooling: True for pooling endpoints only, False for generating ones only, None for both.
    """

    start: datetime
    end: datetime
    width: str
    group_by: Sequence[str] = ()
    tenants: Sequence[int] | None = None
    users: Sequence[int] = ()
    keys: Sequence[str] = ()
    models: Sequence[str] = ()
    pooling: bool | None = None


@dataclass(slots=True)
class UsageTotals:
    """A group's usage in one bucket.

    `group` maps the names of the query's groupings to values or None; its buckets share it.
    """

    start: datetime
    group: Mapping[str, str | None] = field(default_factory=dict)
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    images: int = 0
    audio_ms: int = 0
    cost_nanos: int = 0

    def add(self, amounts: Sequence[int]) -> None:
        """Add amounts in the order of `SUM_FIELDS`."""
        for name, amount in zip(SUM_FIELDS, amounts, strict=True):
            setattr(self, name, getattr(self, name) + amount)

    @property
    def amounts(self) -> tuple[int, ...]:
        """In the order of `SUM_FIELDS`."""
        return tuple(getattr(self, name) for name in SUM_FIELDS)


def access_report_tenants(caller: Caller, named: Sequence[str]) -> list[int] | None:
    """The tenants in a caller's report: its own; all (None) for an operator.

    `named`: slugs to restrict to; empty for no restriction. Raises `NotFound` for a tenant that
    the caller can't see.
    """
    if OPERATOR not in caller.scopes:
        if strangers := [slug for slug in named if slug != caller.tenant]:
            raise NotFound(f"Project {strangers[0][:80]!r} not found.", param="project_ids")
        return [caller.tenant_id]
    if not named:
        return None
    tenants = dict(Tenant.objects.filter(slug__in=named).values_list("slug", "pk"))
    for slug in named:
        if slug not in tenants:
            raise NotFound(f"Project {slug[:80]!r} not found.", param="project_ids")
    return list(tenants.values())


def report(question: UsageQuery, *, total: bool = False) -> list[UsageTotals]:
    """The sums by bucket, oldest first; buckets without usage are omitted.

    Grouped by user, a key's requests count for its creator. The caller must have checked access.
    May block.

    Args:
        total: let the database add all buckets up, one sum per group; `start` has no meaning then.
    """
    columns = [_COLUMNS[name] for name in question.group_by]
    by_user = "user_id" in columns or bool(question.users)
    grouped = sorted({*columns, *(("user_id", "key_id") if by_user else ())})
    rows = _rows(question, grouped, total=total)
    names = GroupNames(rows, grouped, question.group_by)
    totals: dict[Any, dict[int, UsageTotals]] = defaultdict(dict)
    end = 1 + len(grouped)
    for row in rows:
        if question.users and names.user_of(row) not in question.users:
            continue
        number = names.number_of(row[1:end])
        bucket = totals[row[0]]
        if number in bucket:
            bucket[number].add(row[end:])
        else:
            bucket[number] = UsageTotals(names.moment(row[0]), names.labels[number], *row[end:])
    rank = names.ranks().__getitem__  # integers are cheaper to sort than names
    return [
        totals[moment][number]
        for moment in sorted(totals)
        for number in sorted(totals[moment], key=rank)
    ]


def _rows(question: UsageQuery, grouped: Sequence[str], *, total: bool) -> list[tuple[Any, ...]]:
    """Bucket, groups and sums from the coarsest table that has the buckets' width.

    A bucket is in the form that `GroupNames.moment` reads; buckets sort by time.
    """
    query: QuerySet[Any]
    sums: dict[str, Aggregate]
    if question.width == "1m":
        query = UsageEntry.objects.filter(
            started_at__gte=question.start, started_at__lt=question.end
        ).annotate(bucket=_Seconds("started_at"), key_id=Coalesce("api_key_id", Value(0)))
        # The ledger's own column may be NULL where the roll-ups have 0.
        sums = {
            f"sum_{name}": Count("pk") if name == "requests" else Sum(name) for name in SUM_FIELDS
        }
    else:
        table = UsageHour if question.width == "1h" else UsageDay
        query = table.objects.filter(start__gte=question.start, start__lt=question.end)
        sqlite = connections[query.db].vendor == "sqlite"
        query = query.annotate(bucket=_Text("start") if sqlite else _Seconds("start"))
        sums = {f"sum_{name}": Sum(name) for name in SUM_FIELDS}
        if {"key_id", "model"} <= set(grouped) and not total:
            sums = {}  # nearly every row is its own group: adding up here costs less
    if question.tenants is not None:
        query = query.filter(tenant_id__in=question.tenants)
    if question.models:
        query = query.filter(model__in=question.models)
    if question.keys:
        ids = list(ApiKey.objects.filter(public_id__in=question.keys).values_list("pk", flat=True))
        query = query.filter(key_id__in=ids)
    if question.pooling is True:
        query = query.filter(endpoint__in=POOLING)
    elif question.pooling is False:
        query = query.exclude(endpoint__in=POOLING)
    if total:
        query = query.annotate(bucket=Value(0))  # type: ignore[no-redef]  # replaced
    if not sums:
        return list(query.values_list("bucket", *grouped, *SUM_FIELDS))
    sums_by_bucket = query.order_by().values("bucket", *grouped).annotate(**sums)
    rows = list(sums_by_bucket.values_list("bucket", *grouped, *sums))
    # Without grouping, SQL returns a row even if nothing matches.
    return [row for row in rows if row[-1] is not None] if total else rows


class _Seconds(Func):
    """The minute of a datetime as seconds since 1970: an integer is cheaper to read."""

    output_field = BigIntegerField()

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """SQLite stores datetimes as text."""
        template = "CAST(strftime('%%%%s', substr(%(expressions)s, 1, 16)) AS INTEGER)"
        return super().as_sql(compiler, connection, template=template, **context)

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """PostgreSQL stores them as integers; `extract` would make decimals, at twice the cost."""
        template = "(floor(date_part('epoch', %(expressions)s) / 60) * 60)::bigint"
        return super().as_sql(compiler, connection, template=template, **context)


class _Text(Func):
    """A datetime as SQLite stores it.

    Converting every row would cost more than parsing the few distinct values.
    """

    template, output_field = "%(expressions)s || ''", TextField()


def _in_chunks(rows: QuerySet[Any, Any], ids: Collection[int]) -> Iterator[Any]:
    """The rows with these ids, in several queries if there are many."""
    ordered = sorted(ids)
    for start in range(0, len(ordered), MAX_IDS):
        yield from rows.filter(pk__in=ordered[start : start + MAX_IDS])


class GroupNames:
    """Maps database ids to public names: tenants by slug, keys by their public id.

    Each group is resolved once, however many buckets have it.
    """

    def __init__(
        self, rows: Sequence[tuple[Any, ...]], grouped: Sequence[str], group_by: Sequence[str]
    ) -> None:
        self._index_by_column = {column: index for index, column in enumerate(grouped)}
        self._group_by = group_by
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._groups: dict[tuple[str | None, ...], int] = {}
        #: Group number -> its values by grouping name.
        self.labels: list[dict[str, str | None]] = []
        self._moments: dict[int | str, datetime] = {}
        self._tenants: dict[int, str] = {}
        self._keys: dict[int, tuple[str, int | None]] = {}
        if "project_id" in group_by:
            ids = {row[1 + self._index_by_column["tenant_id"]] for row in rows}
            self._tenants = dict(_in_chunks(Tenant.objects.values_list("pk", "slug"), ids))
        if "key_id" in self._index_by_column:
            ids = {row[1 + self._index_by_column["key_id"]] for row in rows}
            columns = ("pk", "public_id", "created_by_id", "service_account_id")
            keys = _in_chunks(ApiKey.objects.values_list(*columns), ids)
            # A service account's key belongs to no user, not even the one who created it.
            self._keys = {
                pk: (public_id, None if account else maker)
                for pk, public_id, maker, account in keys
            }

    def moment(self, bucket: int | str) -> datetime:
        """A bucket's beginning: seconds since 1970, or SQLite's own text."""
        if bucket not in self._moments:
            self._moments[bucket] = (
                datetime.fromtimestamp(bucket, UTC)
                if isinstance(bucket, int)
                else datetime.fromisoformat(bucket).replace(tzinfo=UTC)
            )
        return self._moments[bucket]

    def user_of(self, row: tuple[Any, ...]) -> int:
        """Id of the requesting user, or of the key's creator; 0 for none."""
        return self._user(row[1:])

    def number_of(self, values: tuple[Any, ...]) -> int:
        """Number of the group that a row belongs to."""
        number = self._numbers.get(values)
        if number is None:
            group = tuple(self._label(name, values) for name in self._group_by)
            number = self._groups.setdefault(group, len(self._groups))
            if number == len(self.labels):
                self.labels.append(dict(zip(self._group_by, group, strict=True)))
            self._numbers[values] = number
        return number

    def ranks(self) -> list[int]:
        """Each group's rank by its values, by the group's number."""
        ranks = [0] * len(self.labels)
        ordered = sorted(self._groups, key=lambda group: [value or "" for value in group])
        for rank, group in enumerate(ordered):
            ranks[self._groups[group]] = rank
        return ranks

    def _user(self, values: tuple[Any, ...]) -> int:
        maker = self._keys.get(values[self._index_by_column["key_id"]], ("", None))[1]
        return values[self._index_by_column["user_id"]] or maker or 0

    def _label(self, name: str, values: tuple[Any, ...]) -> str | None:
        value = values[self._index_by_column[_COLUMNS[name]]]
        if name == "project_id":
            return self._tenants.get(value, str(value))
        if name == "user_id":
            user = self._user(values)
            return str(user) if user else None
        if name == "api_key_id":
            key = self._keys.get(value)
            return key[0] if key else (str(value) if value else None)
        if name == "adapter":
            return value or None
        return str(value)


#: Maximum number of sums that one response reads; the rest is on the next page.
MAX_ROWS = 12_000
#: The same for groupings with few groups, which the database adds up.
MAX_ROWS_AGGREGATED = 60_000
#: The same when all buckets are added up.
MAX_ROWS_EXPORT = 100_000
#: Maximum number of requests that a response by minute reads, as these come from the ledger.
MAX_REQUESTS = 10_000
SMALL_TABLE_ROWS = {"model", "line_item", "adapter", "endpoint"}


def first_page(question: UsageQuery, *, total: bool = False) -> UsageQuery:
    """Limit a query to as many buckets as can be read at once, at least one. May block.

    By minute it ends on a full hour, or where the query does. `total`: as in `report`.
    """
    remaining = MAX_ROWS_AGGREGATED if SMALL_TABLE_ROWS.issuperset(question.group_by) else MAX_ROWS
    if total:
        remaining = MAX_ROWS_EXPORT
    table = UsageDay if question.width == "1d" else UsageHour
    count: Aggregate = Count("pk")
    if question.width == "1m":
        # Hourly sums give the number of ledger rows without reading them.
        remaining, count = MAX_REQUESTS, Sum("requests")
    first = question.start.replace(minute=0)
    rows = table.objects.filter(start__gte=first, start__lt=question.end)
    if question.tenants is not None:
        rows = rows.filter(tenant_id__in=question.tenants)
    counts = rows.order_by("start").values_list("start").annotate(rows=count)
    for start, num_rows in counts:
        remaining -= num_rows
        if remaining < 0 and start > first:
            return replace(question, end=start)
    return question
