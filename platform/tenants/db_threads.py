"""Database work for coroutines, in a few threads of its own.

Django runs a request's `sync_to_async` work in a thread that ends with the request. Work that
outlives a request or is shared by several, such as a cached look-up, must not depend on one.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections

P = ParamSpec("P")
T = TypeVar("T")

_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="quire-db")
# Writing a large file takes seconds: looking up a key must not wait for that.
_file_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="quire-files")


async def in_db_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` in a database thread. Its connection goes back to the pool; SQLite's stays."""
    return await _run_in(_threads, partial(function, *args, **kwargs))


async def in_file_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same for what keeps files busy besides the database."""
    return await _run_in(_file_threads, partial(function, *args, **kwargs))


async def _run_in(threads: ThreadPoolExecutor, function: Callable[[], T]) -> T:
    def work() -> T:
        _close_old()
        try:
            return function()
        finally:
            _close_old()

    return await sync_to_async(work, thread_sensitive=False, executor=threads)()


def _close_old() -> None:
    """As Django does between requests, but for whole connections to SQLite.

    To open its file and set it up costs several times what most look-ups do, and these threads, few
    as they are, live as long as the process.
    """
    for connection in connections.all(initialized_only=True):
        whole = connection.autocommit and not connection.errors_occurred
        if connection.vendor != "sqlite" or not whole:
            connection.close_if_unusable_or_obsolete()
