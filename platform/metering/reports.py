"""Usage by minute, hour or day, grouped: what the API's reports and the console show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import CharField, Count, F, Func, QuerySet, Sum, Value
from django.db.models.functions import Coalesce

from metering.models import UsageDay, UsageEntry, UsageHour
from metering.models.roll_up import SUMS
from tenants.authentication import Caller
from tenants.errors import NotFound
from tenants.models import ApiKey, Tenant
from tenants.scopes import OPERATOR

WIDTHS = {"1m": timedelta(minutes=1), "1h": timedelta(hours=1), "1d": timedelta(days=1)}
#: Endpoints that pool instead of generating; all others generate.
POOLING = ("embeddings", "pooling", "classify", "score", "rerank")

#: What may be grouped by -> the column that holds it.
_COLUMNS = {"project_id": "tenant_id", "user_id": "user_id", "api_key_id": "key_id"}
_COLUMNS |= {"model": "model", "line_item": "model", "endpoint": "endpoint"}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked for.

    Attributes:
        start, end: aware; `start` is included and lies on a bucket's beginning, `end` is not.
        width: of `WIDTHS`.
        group_by: of "project_id", "user_id", "api_key_id", "model" (or "line_item"), "endpoint".
        tenants: None for all; else these rows alone.
        users, keys, models: these alone; empty: all. `keys` are public ids.
        pooling: endpoints that pool alone, those that generate alone, or None for both.
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
class Sums:
    """What one group used in one bucket. `group` has the question's names, None for nobody."""

    start: datetime
    group: dict[str, str | None] = field(default_factory=dict)
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_nanos: int = 0

    def add(self, row: dict[str, Any]) -> None:
        """Add the amounts of a database's row."""
        self.requests += row["sum_requests"]
        self.prompt_tokens += row["sum_prompt_tokens"]
        self.cached_tokens += row["sum_cached_tokens"]
        self.completion_tokens += row["sum_completion_tokens"]
        self.cost_nanos += row["sum_cost_nanos"]


def access_report_tenants(caller: Caller, named: Sequence[str]) -> list[int] | None:
    """The tenants that a caller's report is about: its own; all (None) for an operator.

    `named`: slugs; empty: all that the caller may see. Raises `NotFound` for a stranger's.
    """
    if OPERATOR not in caller.scopes:
        if strangers := [slug for slug in named if slug != caller.tenant]:
            raise NotFound(f"There is no project {strangers[0][:80]!r}.", param="project_ids")
        return [caller.tenant_id]
    if not named:
        return None
    found = dict(Tenant.objects.filter(slug__in=named).values_list("slug", "pk"))
    for slug in named:
        if slug not in found:
            raise NotFound(f"There is no project {slug[:80]!r}.", param="project_ids")
    return list(found.values())


def report(question: Question) -> list[Sums]:
    """The sums, bucket by bucket, the oldest first; buckets without use are left out.

    A key's requests count as its maker's when grouped by user. The caller has checked who may see
    what. May block.
    """
    columns = [_COLUMNS[name] for name in question.group_by]
    by_user = "user_id" in columns or bool(question.users)
    grouped = sorted({*columns, *(("user_id", "key_id") if by_user else ())})
    rows = _rows(question, grouped)
    names = _Names(rows, question.group_by)
    found: dict[tuple[Any, ...], Sums] = {}
    moment = _minute if question.width == "1m" else _utc
    for row in rows:
        user_id = names.user_of(row) if by_user else 0
        if question.users and user_id not in question.users:
            continue
        group = {name: names.shown(name, row, user_id) for name in question.group_by}
        place = (row["bucket"], *group.values())
        sums = found.get(place)
        if sums is None:
            sums = found[place] = Sums(moment(row["bucket"]), group)
        sums.add(row)
    return sorted(
        found.values(), key=lambda s: (s.start, [value or "" for value in s.group.values()])
    )


def _minute(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%d %H:%M").replace(tzinfo=UTC)


def _utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC)


def _rows(question: Question, grouped: Sequence[str]) -> list[dict[str, Any]]:
    """Sums from the coarsest table that tells the buckets apart."""
    query: QuerySet[Any]
    if question.width == "1m":
        query = UsageEntry.objects.filter(
            started_at__gte=question.start, started_at__lt=question.end
        ).annotate(bucket=_Minute("started_at"), key_id=Coalesce("api_key_id", Value(0)))
        # The ledger's own column may be NULL where the roll-ups have 0.
        sums = {f"sum_{name}": Sum(name) for name in SUMS if name != "requests"}
        sums["sum_requests"] = Count("pk")
    else:
        table = UsageHour if question.width == "1h" else UsageDay
        query = table.objects.filter(start__gte=question.start, start__lt=question.end)
        query = query.annotate(bucket=F("start"))
        sums = {f"sum_{name}": Sum(name) for name in SUMS}
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
    return list(query.order_by().values("bucket", *grouped).annotate(**sums))


class _Minute(Func):
    """The minute of a moment, UTC, as "2026-11-22 10:05"; without a Python function on SQLite."""

    output_field = CharField()

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """SQLite keeps moments as text."""
        template = "substr(%(expressions)s, 1, 16)"
        return super().as_sql(compiler, connection, template=template, **context)

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """PostgreSQL keeps them as numbers."""
        template = "to_char((%(expressions)s) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI')"
        return super().as_sql(compiler, connection, template=template, **context)


class _Names:
    """What rows are called outside: tenants by slug, keys by their public id."""

    def __init__(self, rows: Sequence[dict[str, Any]], group_by: Sequence[str]) -> None:
        self._tenants: dict[int, str] = {}
        self._keys: dict[int, tuple[str, int | None]] = {}
        if "project_id" in group_by:
            ids = {row["tenant_id"] for row in rows}
            self._tenants = dict(Tenant.objects.filter(pk__in=ids).values_list("pk", "slug"))
        if rows and "key_id" in rows[0]:
            keys = ApiKey.objects.filter(pk__in={row["key_id"] for row in rows})
            found = keys.values_list("pk", "public_id", "created_by_id", "service_account_id")
            # A service account's key is no person's, whoever made it.
            self._keys = {
                pk: (public_id, None if account else maker)
                for pk, public_id, maker, account in found
            }

    def user_of(self, row: dict[str, Any]) -> int:
        """Who asked, or made the key that asked; 0 for nobody."""
        return row["user_id"] or self._keys.get(row["key_id"], ("", None))[1] or 0

    def shown(self, name: str, row: dict[str, Any], user_id: int) -> str | None:
        """A group's value as the API shows it."""
        if name == "project_id":
            return self._tenants.get(row["tenant_id"], str(row["tenant_id"]))
        if name == "user_id":
            return str(user_id) if user_id else None
        if name == "api_key_id":
            known = self._keys.get(row["key_id"])
            return known[0] if known else (str(row["key_id"]) if row["key_id"] else None)
        return str(row[_COLUMNS[name]])
