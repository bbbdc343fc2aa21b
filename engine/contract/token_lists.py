"""Millions of prompt tokens without what the garbage collector makes of them.

It goes through every list that it knows, number by number: of a body of 10 MB a tenth of a second
each time, in which no stream gets a token.
"""

from __future__ import annotations

import ctypes

_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.argtypes, _untrack.restype = [ctypes.py_object], None


def untracked(token_ids: list[int]) -> list[int]:
    """The same list, unknown to the collector from now on. Numbers can't be part of a cycle."""
    _untrack(token_ids)
    return token_ids
