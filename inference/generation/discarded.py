"""Whose unfinished answers cost nothing: those that a worker makes anew when it's interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_made_anew: ContextVar[bool] = ContextVar("made_anew", default=False)


@contextmanager
def unbilled_unless_finished() -> Iterator[None]:
    """Of what begins in the block nothing is billed unless it comes to its end."""
    token = _made_anew.set(True)
    try:
        yield
    finally:
        _made_anew.reset(token)


def is_unbilled_unless_finished() -> bool:
    """Whether this task's answers are."""
    return _made_anew.get()
