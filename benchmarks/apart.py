"""An engine in a process of its own, for benchmarks that let several take turns.

A process's second engine is some percent slower than its first, whatever it can do, and two that
share a process share its allocator and threads.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

from engine.offline.llm import LLM


@dataclass(frozen=True, slots=True)
class Apart:
    """What serves a benchmark with an engine, elsewhere: `call` runs a method of it."""

    _asked: Connection

    @classmethod
    @contextlib.contextmanager
    def started(
        cls, make: Callable[[LLM], object], model: str, **options: object
    ) -> Iterator[Self]:
        """`make` of an engine with these options of `LLM`, until the context ends.

        Idle it takes no processor time. `make` is of a module's top level.
        """
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload([__name__, make.__module__])
        mine, its = processes.Pipe()
        process = processes.Process(target=_serve, args=(its, make, model, options), daemon=True)
        process.start()
        its.close()
        try:
            yield cls(mine)
            mine.send(None)
        finally:
            mine.close()
            process.join()

    def call(self, method: str, *args: object) -> Any:
        """What the method returns. Raises: `EOFError` when the process has failed."""
        self._asked.send((method, args))
        return self._asked.recv()


def _serve(
    asked: Connection, make: Callable[[LLM], object], model: str, options: dict[str, Any]
) -> None:
    """Answer calls until there's None."""
    serving = make(LLM(model, **options))
    while (call := asked.recv()) is not None:
        method, args = call
        asked.send(getattr(serving, method)(*args))
