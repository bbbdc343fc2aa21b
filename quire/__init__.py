"""Quire: `from quire import LLM` provides the exports of `engine`, loaded at first use."""

from __future__ import annotations

from typing import Any

import engine

__all__ = list(engine.__all__)


def __getattr__(name: str) -> Any:
    """Get an export of `engine`."""
    try:
        return getattr(engine, name)
    except AttributeError as error:
        raise AttributeError(f"module 'quire' has no attribute {name!r}") from error
