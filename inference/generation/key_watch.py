"""`KeyWatch`: whether whoever asked may still ask, looked at again while the answer runs."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.contract.errors import QuireError
from inference.generation.background import spawn
from tenants.authentication import Caller, check_still_valid, still_valid_at_hand

#: How often a running request's key is looked at again.
RECHECK_KEY_S = 0.5


class KeyWatch:
    """Of one request. No token waits for what the database says of its key, nor do all of a key's
    streams go on in one turn of the loop when it has spoken.

    Args:
        caller: who asked. fail: told the error when they aren't let in any more.
    """

    __slots__ = ("_caller", "_fail", "_looked_at")

    def __init__(self, caller: Caller, fail: Callable[[QuireError], None]) -> None:
        self._caller, self._fail = caller, fail
        self._looked_at = time.monotonic()

    def look(self) -> None:
        """Look, every `RECHECK_KEY_S` seconds.

        Raises what is known to be wrong. What must be asked for is told to `fail`, soon.
        """
        now = time.monotonic()
        if now - self._looked_at < RECHECK_KEY_S:
            return
        self._looked_at = now
        if not still_valid_at_hand(self._caller):
            spawn(self._ask())

    async def _ask(self) -> None:
        try:
            await check_still_valid(self._caller)
        except QuireError as error:
            self._fail(error)
