"""Progress bars of offline batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tqdm import tqdm

#: Whether to show a bar; or a function that makes one, with tqdm's arguments.
UseTqdm = bool | Callable[..., Any]


def progress(wanted: UseTqdm, total: int) -> Any:
    """A bar of so many requests, which is a context manager."""
    make = wanted if callable(wanted) else tqdm
    return make(total=total, desc="Processed prompts", disable=not wanted)
