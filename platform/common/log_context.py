"""The current request's id, tenant and model, added to every log line.

Log lines are written by code that knows no request, so this module uses context variables for them.
A task inherits the fields of the code that creates it; a task that outlives the request is
`detached`.
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
#: Clear them for the rest of the task.
end_request = clear_contextvars
#: The fields of the current request; empty outside of a request.
request_fields = get_contextvars
#: The structlog processor that adds them to a line.
add_request = merge_contextvars


@contextmanager
def detached() -> Iterator[None]:
    """Run without a request, for example to create a task that serves all of them."""
    fields = get_contextvars()
    clear_contextvars()
    try:
        yield
    finally:
        bind_contextvars(**fields)
