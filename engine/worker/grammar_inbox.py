"""`GrammarInbox`: where a step finds its grammar masks, which come while its model runs."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from engine.scheduler.plan import GrammarOutput


class GrammarInbox:
    """Masks of steps that were begun, by step. `put` and `take` may meet in any order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outputs: dict[int, Future[GrammarOutput]] = {}

    def _of(self, step: int) -> Future[GrammarOutput]:
        with self._lock:
            return self._outputs.setdefault(step, Future())

    def put(self, output: GrammarOutput) -> None:
        """A step's masks are there."""
        self._of(output.step).set_result(output)

    def take(self, step: int) -> GrammarOutput:
        """A step's masks, once; waits until they are there.

        Raises RuntimeError where they couldn't be made.
        """
        output = self._of(step).result()
        with self._lock:
            # With those of steps before it that sampled nothing.
            for old in [key for key in self._outputs if key <= step]:
                del self._outputs[old]
        if output.failure:
            raise RuntimeError(output.failure)
        return output

    def clear(self) -> None:
        """Forget what steps that failed haven't taken."""
        with self._lock:
            self._outputs.clear()
