"""Reports, searches and lists: in a few threads that only they wait for, tenants in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from common.db import with_time_limit
from inference.loop.offload import FairThreadPool
from tenants.authentication import Caller

P = ParamSpec("P")
T = TypeVar("T")

_threads = FairThreadPool(2, "quire-reports", "reports and lists")


async def in_report_thread(
    caller: Caller, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """`function(...)`, which only reads from the database. Not begun once the client has left.

    Raises: `QueryTimeout` as `with_time_limit`; `Overloaded` when too many wait.
    """
    job = partial(with_time_limit, partial(function, *args, **kwargs))
    return await asyncio.wrap_future(_threads.submit(caller.tenant, job))
