"""Triton's interpreter without what it does in vain: the same results in about a third of the time.

For each call of a function within a kernel it looks through all of `triton.language` for what to
patch, though the launch has patched it; it works out for each sum of integers whether it
overflows, though only a debug mode that is off would say so; and it lists all types to find one.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_MISSING = object()
_POINTER = np.dtype(np.uint64)
_plain_patch = interpreter._patch_lang


@functools.cache
def _patches() -> list[tuple[Any, str, Any]]:
    """(object, attribute, what the interpreter puts there), for `tl` and `tl.core`."""
    anywhere = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    scope = _plain_patch(anywhere)
    found = {(id(obj), name): (obj, name, vars(obj)[name]) for obj, name, _ in scope._changes}
    scope.restore()
    return list(found.values())


class _Scope:
    """What is patched for a launch; for what is called within one, nothing is left to do."""

    patched = False

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        if _Scope.patched:
            return
        for obj, name, new in _patches():
            self._before.append((obj, name, vars(obj).get(name, _MISSING)))
            setattr(obj, name, new)
        _Scope.patched = True

    def restore(self) -> None:
        if not self._before:
            return
        _Scope.patched = False
        for obj, name, before in self._before:
            if before is _MISSING:
                delattr(obj, name)
            else:
                setattr(obj, name, before)


_plain_dtype = functools.cache(interpreter._get_np_dtype)


def _np_dtype(dtype: tl.dtype) -> np.dtype[Any]:
    """numpy's type of an element; types are equal by their names, and blocks have many."""
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return _POINTER if isinstance(element, tl.pointer_type) else _plain_dtype(element)


def quicken() -> None:
    """For this process."""
    interpreter._get_np_dtype = _np_dtype
    interpreter._patch_lang = lambda fn: _Scope()
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
