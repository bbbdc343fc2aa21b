"""What a model that loads is doing right now: told by the parts of the loader to whoever watches.

Torch-free. Nobody watches in an offline `LLM`: then telling costs a look at a variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

#: In their order. Weights are rounded and packed while they are read, a few megabytes at a time.
DOWNLOADING, KERNELS, READING, CACHE, WARM_UP = (
    "downloading",
    "kernels",
    "reading",
    "cache",
    "warm_up",
)
PHASES = (DOWNLOADING, KERNELS, READING, CACHE, WARM_UP)


class LoadPhase(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One of `PHASES`; `done` of `total` bytes while it downloads or reads, 0 of 0 otherwise."""

    phase: str
    done: int = 0
    total: int = 0


Watcher = Callable[[LoadPhase], None]
#: Of this process: it loads one model at a time, but downloads in several threads.
_watchers: list[Watcher] = []


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Have `watcher` told of all that is noted meanwhile, by any thread."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def note(phase: str, done: int = 0, total: int = 0) -> None:
    """Tell whoever watches."""
    for watcher in _watchers:
        watcher(LoadPhase(phase=phase, done=done, total=total))
