"""A state machine over a text that grows."""

from __future__ import annotations

from collections.abc import Callable

from inference.parsing.parts import Part, joined


class StateMachine:
    """Takes a text apart; how it is cut into pieces changes nothing.

    A subclass sets `_state` to a method that takes what it can from `_held` into `_out`, and
    returns whether there may be more to take. `_ended` tells that no more text will come.

    Args:
        state: to begin with.
    """

    def __init__(self, state: Callable[[], bool]) -> None:
        self._held = ""
        self._ended = False
        self._out: list[Part] = []
        self._state = state

    def push(self, text: str) -> list[Part]:
        """What is certain after this text."""
        self._held += text
        return self._run()

    def flush(self) -> list[Part]:
        """The rest, now that the text has ended."""
        self._ended = True
        return self._run()

    def _run(self) -> list[Part]:
        while self._state():
            pass
        out, self._out = self._out, []
        return joined(out)
