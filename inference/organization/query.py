"""Reading a report's question from the address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.http import QueryDict

from engine.contract.errors import InvalidRequest
from metering.access import WIDTHS, Question, access_report_tenants, first_page
from tenants.authentication import Caller

#: Buckets on a page by width: what is given without `limit`, and the most.
PAGES = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)}
COST_PAGE = (7, 180)
#: 9999-12-31, the last day that dates have.
LAST_SECOND = 253_402_214_400


@dataclass(frozen=True)
class Asked:
    """A question, what to show and where the next page begins (None after the last)."""

    question: Question
    buckets: list[datetime]
    next_page: str | None
    as_csv: bool

    @property
    def width(self) -> timedelta:
        """Of a bucket."""
        return WIDTHS[self.question.width]


def read_query(
    query: QueryDict,
    caller: Caller,
    *,
    groups: Sequence[str],
    widths: Sequence[str],
    pages: dict[str, tuple[int, int]],
    pooling: bool | None,
) -> Asked:
    """Check everything. May block: it looks for the tenants that are named.

    Raises: `InvalidRequest` with the parameter's name; `NotFound` for somebody else's tenant.
    """
    width = _choice(query, "bucket_width", widths, default="1d")
    step = WIDTHS[width]
    default, most = pages[width]
    limit = _integer(query, "limit", default, 1, most)
    if query.get("start_time") is None:
        raise InvalidRequest("start_time is required: seconds since 1970.", param="start_time")
    first = _floor(_integer(query, "start_time", 0, 0, LAST_SECOND), step)
    if query.get("page") is not None:
        first = _floor(_page(query["page"]), step)
    now = int(datetime.now(UTC).timestamp())
    end = _integer(query, "end_time", min(LAST_SECOND, now + 1), 0, LAST_SECOND)
    seconds = int(step.total_seconds())
    wanted = max(0, -(-(end - first) // seconds))
    count = min(limit, wanted)
    last = first + count * seconds
    as_csv = _choice(query, "format", ("json", "csv"), default="json") == "csv"
    named = _list(query, "project_ids")
    question = Question(
        start=_moment(first),
        end=_moment(min(last, end) if count else first),
        width=width,
        group_by=_groups(query, groups),
        tenants=access_report_tenants(caller, named),
        users=[_user(text) for text in _list(query, "user_ids")],
        keys=_list(query, "api_key_ids"),
        models=_list(query, "models"),
        pooling=pooling,
    )
    page = first_page(question)
    if page.end < question.end:
        last = int(page.end.timestamp())
        count = (last - first) // seconds
    buckets = [_moment(first + number * seconds) for number in range(count)]
    return Asked(page, buckets, f"page_{last}" if wanted > count else None, as_csv)


def _list(query: QueryDict, name: str) -> list[str]:
    """`name=a&name=b`, `name[]=a` or `name=a,b`: clients send each of them."""
    given = [*query.getlist(name), *query.getlist(f"{name}[]")]
    values = [value for text in given for value in text.split(",") if value]
    if len(values) > 100:
        raise InvalidRequest(f"{name} takes at most 100 values.", param=name)
    if any("\0" in value for value in values):
        raise InvalidRequest(f"{name} must hold no NUL.", param=name)
    return values


def _groups(query: QueryDict, allowed: Sequence[str]) -> list[str]:
    found = list(dict.fromkeys(_list(query, "group_by")))
    for name in found:
        if name not in allowed:
            raise InvalidRequest(
                f"group_by must be of {', '.join(allowed)}; got {name[:50]!r}.", param="group_by"
            )
    return found


def _user(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequest(f"user_ids must be numbers, got {text[:50]!r}.", param="user_ids")
    return int(text)


def _choice(query: QueryDict, name: str, allowed: Sequence[str], *, default: str) -> str:
    value = query.get(name, default)
    if value not in allowed:
        raise InvalidRequest(
            f"{name} must be one of {', '.join(allowed)}; got {value[:50]!r}.", param=name
        )
    return value


def _integer(query: QueryDict, name: str, default: int, low: int, high: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 19 and low <= int(text) <= high):
        raise InvalidRequest(
            f"{name} must be a whole number in [{low}, {high}], got {text[:50]!r}.", param=name
        )
    return int(text)


def _page(text: str) -> int:
    number = text.removeprefix("page_")
    if not (number.isascii() and number.isdigit() and len(number) < 13):
        raise InvalidRequest("page must be a next_page of an earlier answer.", param="page")
    return min(int(number), LAST_SECOND)


def _floor(seconds: int, step: timedelta) -> int:
    """The beginning of the bucket, by UTC."""
    return seconds - seconds % int(step.total_seconds())


def _moment(seconds: int) -> datetime:
    return datetime.fromtimestamp(min(seconds, LAST_SECOND), UTC)
