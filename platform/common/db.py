"""Database work of coroutines, in separate small thread pools.

Look-ups that every request waits for (its key, limits, prices, its model) have threads that nothing
slow uses. Reports, searches and lists are slow: they have other threads, and a time limit.

Django runs a request's `sync_to_async` work in a thread that ends with the request. Work that
outlives a request or is shared by several, such as a cached look-up, must not depend on it.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.core.exceptions import ValidationError
from django.db import (
    DataError,
    IntegrityError,
    OperationalError,
    connection,
    connections,
    models,
    transaction,
)

from common.errors import Conflict, QueryTimeout
from engine.contract.errors import InvalidRequest

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=models.Model)

#: Errors of a row that the database would refuse again at a retry.
ROW_ERRORS = (DataError, IntegrityError, ValueError, TypeError, OverflowError)
#: Rows or ids per statement, few enough that other writers don't wait long for it.
PAGE = 500
#: Time limit of a statement of a report, search or list.
REPORT_LIMIT_S = 10.0
#: Steps of SQLite's virtual machine between two checks of the time; about a millisecond.
_STEPS = 10_000
#: PostgreSQL's and SQLite's messages for a statement that was cancelled.
_QUERY_CANCELED, _INTERRUPTED = "57014", "SQLITE_INTERRUPT"

# Together with those of reports, no more than a pool of PostgreSQL connections has
# (`config.connections`).
_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="quire-db")
# Writing a large file takes seconds.
_file_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="quire-files")
_admission_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="quire-admission")


def pages(items: Iterable[T]) -> Iterator[list[T]]:
    """Split items into lists of at most `PAGE`, one query each."""
    iterator = iter(items)
    while page := list(islice(iterator, PAGE)):
        yield page


def iterate_by_key(rows: models.QuerySet[M], *, newest_first: bool = False) -> Iterator[M]:
    """All rows in the order of their primary keys, `PAGE` per query.

    A server-side cursor would hold its connection as long as a slow client reads, and doesn't
    survive a transaction behind a PgBouncer in transaction mode.
    """
    sign, compare = ("-", "pk__lt") if newest_first else ("", "pk__gt")
    ordered = rows.order_by(f"{sign}pk")
    page = list(ordered[:PAGE])
    while page:
        yield from page
        page = list(ordered.filter(**{compare: page[-1].pk})[:PAGE]) if len(page) == PAGE else []


async def run_in_db_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` in a database thread. Its connection returns to the pool; SQLite's stays."""
    return await _run_in(_threads, partial(function, *args, **kwargs))


async def run_in_file_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run in a thread for work on files in addition to the database."""
    return await _run_in(_file_threads, partial(function, *args, **kwargs))


async def in_admission_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run in a thread reserved for the short look-ups of every request."""
    return await _run_in(_admission_threads, partial(function, *args, **kwargs))


def with_time_limit(function: Callable[[], T]) -> T:
    """Run `function`, which reads from the database, in a thread for reports.

    Raises: `QueryTimeout` if a statement takes longer than `REPORT_LIMIT_S`; on SQLite, if all of
    them together do.
    """
    return _with_connection(partial(_limited, function))


def _limited(function: Callable[[], T]) -> T:
    limit = _limit_sqlite if connection.vendor == "sqlite" else _limit_postgresql
    try:
        with limit():
            return function()
    except OperationalError as error:
        cause = error.__cause__
        canceled = getattr(cause, "sqlstate", None) == _QUERY_CANCELED
        if canceled or getattr(cause, "sqlite_errorname", None) == _INTERRUPTED:
            raise QueryTimeout(
                f"The database needs longer than {REPORT_LIMIT_S:g} s for this. Ask for less: a "
                "shorter time, fewer groups, a narrower filter."
            ) from error
        raise


@contextmanager
def _limit_postgresql() -> Iterator[None]:
    with transaction.atomic(), connection.cursor() as cursor:
        limit_ms = str(round(REPORT_LIMIT_S * 1000))
        cursor.execute("SELECT set_config('statement_timeout', %s, true)", [limit_ms])
        yield


@contextmanager
def _limit_sqlite() -> Iterator[None]:
    connection.ensure_connection()
    deadline = time.monotonic() + REPORT_LIMIT_S
    database = connection.connection
    database.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
    try:
        yield
    finally:
        database.set_progress_handler(None, 0)


async def _run_in(threads: ThreadPoolExecutor, function: Callable[[], T]) -> T:
    work = partial(_with_connection, function)
    return await sync_to_async(work, thread_sensitive=False, executor=threads)()


def _with_connection(function: Callable[[], T]) -> T:
    _close_stale_connections()
    try:
        return function()
    finally:
        _close_stale_connections()


def _close_stale_connections() -> None:
    """Close old connections as Django does between requests, but keep open SQLite's.

    Opening and setting up its file costs several times what most look-ups do, and these few threads
    live as long as the process.
    """
    for database in connections.all(initialized_only=True):
        is_idle = database.autocommit and not database.errors_occurred
        if database.vendor != "sqlite" or not is_idle:
            database.close_if_unusable_or_obsolete()


def save_valid(row: models.Model, *, unchecked: Collection[str] = ()) -> None:
    """Check all fields but those named `unchecked`, and save.

    Raises: `InvalidRequest` with the field in `param`; `Conflict` if a unique value is taken.
    """
    for column in row._meta.concrete_fields:
        value = getattr(row, column.attname)
        if isinstance(value, str) and "\0" in value:  # PostgreSQL can't store NUL
            raise InvalidRequest(f"{column.name} must not contain NUL.", param=column.name)
    try:
        row.full_clean(exclude=set(unchecked), validate_unique=False, validate_constraints=False)
    except ValidationError as error:
        field, messages = next(iter(error.message_dict.items()))
        param = None if field == "__all__" else field
        label = f"{param}: " if param else ""
        raise InvalidRequest(label + " ".join(messages), param=param) from error
    try:
        with transaction.atomic():  # a savepoint: a conflict leaves the outer transaction usable
            row.save()
    except IntegrityError as error:
        raise Conflict(f"There is already a {row._meta.verbose_name} {row}.") from error


def changed(row: models.Model, changes: dict[str, Any]) -> dict[str, list[Any]]:
    """Set the fields and return `{field: [before, after]}` for those that change."""
    difference = {}
    for field, after in changes.items():
        previous = getattr(row, field)
        if previous != after:
            setattr(row, field, after)
            difference[field] = [previous, after]
    return difference
