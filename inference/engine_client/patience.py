"""How long a request's client waits: one that can't be answered by then is refused at once.

`X-Request-Timeout` is seconds until the answer must have begun. The Python SDKs of OpenAI and
Anthropic tell how long they wait for bytes, `x-stainless-read-timeout`: for an answer in one piece
that's the same; a stream gets comment lines meanwhile, and waits.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass

from engine.contract.errors import InvalidRequest

HEADER = "X-Request-Timeout"


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds; infinite: it wasn't told."""

    beginning: float = math.inf
    silence: float = math.inf

    def seconds(self, *, stream: bool) -> float:
        """Until the first of the answer must be there."""
        return self.beginning if stream else min(self.beginning, self.silence)


NONE_TOLD = Patience()
_told: ContextVar[Patience] = ContextVar("patience", default=NONE_TOLD)


def note_patience(beginning: str | None, silence: str | None) -> None:
    """Note for this request's task what `X-Request-Timeout` and the SDK's header say, if anything.

    Raises: `InvalidRequest` unless `X-Request-Timeout` is a number above 0. What an SDK says by
    itself is never refused.
    """
    if beginning is None and silence is None:
        _told.set(NONE_TOLD)
        return
    wanted = math.inf if beginning is None else _seconds(beginning)
    if wanted is None:
        raise InvalidRequest(f"{HEADER} must be seconds above 0.", param=HEADER)
    _told.set(Patience(wanted, _seconds(silence or "") or math.inf))


def patience() -> Patience:
    """Of this task's client."""
    return _told.get()


def _seconds(text: str) -> float | None:
    try:
        value = float(text) if len(text) < 32 else math.nan
    except ValueError:
        return None
    return value if value > 0 and math.isfinite(value) else None
