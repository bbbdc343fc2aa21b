"""`TorchThreads`: an engine in a process that isn't its own leaves torch's threads alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class TorchThreads:
    """Changes torch's number of threads while the engine works, and sets it back afterwards.

    The compiled kernels have threads of their own and leave torch one (torch's idle threads would
    take their cores). Outside of the engine's work torch is the caller's.
    """

    def __init__(self) -> None:
        self._engines: int | None = None
        self._depth = 0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While the engine works. May be entered again inside."""
        callers = torch.get_num_threads()
        if not self._depth and self._engines is not None:
            torch.set_num_threads(self._engines)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._engines = torch.get_num_threads()
                torch.set_num_threads(callers)
