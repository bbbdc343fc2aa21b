"""The request that is being worked on: its id, tenant and model are on every line logged meanwhile.

The one place that uses context variables for it: lines are written by code that knows no request.
A task has the fields of the code that creates it; one that outlives the request is `detached`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from structlog.contextvars import (
    bind_contextvars,
    bound_contextvars,
    clear_contextvars,
    get_contextvars,
    merge_contextvars,
)

#: Add or change fields for the rest of the task: `request_id`, `tenant`, `model`.
bind_request = bind_contextvars
#: The same as a context manager, which restores what was there.
bound_request = bound_contextvars
#: Forget them for the rest of the task.
end_request = clear_contextvars
#: The fields of the current request; empty outside of one.
request_fields = get_contextvars
#: structlog's processor that adds them to a line.
add_request = merge_contextvars


@contextmanager
def detached() -> Iterator[None]:
    """Have no request, such as where a task is created that serves all of them."""
    fields = get_contextvars()
    clear_contextvars()
    try:
        yield
    finally:
        bind_contextvars(**fields)
