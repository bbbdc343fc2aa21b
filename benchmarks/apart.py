"""Engines in processes of their own, for benchmarks in which several take turns.

A process's second engine is some percent slower than its first, and two engines in one process
share its allocator and threads.
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
    """An object with an engine in another process, which takes no processor time while idle."""

    _connection: Connection

    @classmethod
    @contextlib.contextmanager
    def started(
        cls, make: Callable[[LLM], object], model: str, **options: object
    ) -> Iterator[Self]:
        """`make(LLM(model, **options))` in a process until the context ends.

        `make` must be at the top level of a module.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, make.__module__])
        parent, child = context.Pipe()
        process = context.Process(target=_serve, args=(child, make, model, options), daemon=True)
        process.start()
        child.close()
        try:
            yield cls(parent)
            parent.send(None)
        finally:
            parent.close()
            process.join()

    def call(self, method: str, *args: object) -> Any:
        """Call a method of the object. Raises `EOFError` when the process has failed."""
        self._connection.send((method, args))
        return self._connection.recv()


def _serve(
    connection: Connection, make: Callable[[LLM], object], model: str, options: dict[str, Any]
) -> None:
    """Answer calls until None is received."""
    target = make(LLM(model, **options))
    while (call := connection.recv()) is not None:
        method, args = call
        connection.send(getattr(target, method)(*args))
