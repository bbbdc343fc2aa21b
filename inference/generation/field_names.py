"""Errors in the words of the client's own fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from engine.contract.errors import QuireError

E = TypeVar("E", bound=QuireError)


def renamed(error: E, names: Mapping[str, str]) -> E:
    """The same error with `param` and message about the client's field instead of ours.

    Args:
        names: ours -> theirs. `a` stands for `a.b` as well, unless that has a name of its own.
    """
    ours = error.param
    known = ours
    while known is not None and known not in names:
        known = known.rpartition(".")[0] or None
    if ours is not None and known is not None and (theirs := names[known]) != known:
        error.rename(theirs, **({known: theirs} if known != ours else {}))
    return error
