"""An answer in one piece that is kept for whoever asks again, before what it took is billed.

Were it billed first, a gateway that is killed in between would have billed what its client never
got, and gets anew, and pays for again. Kept first, its answer is there for the client, and whoever
settles what the gateway left finds that it is (`metering.gateways.answered_key`).
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar


class Keeping:
    """One request's answer on its way to be kept.

    Attributes:
        requests: ids of what was generated for it, as the ledger has them.
        done: it's kept, or won't be.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.done = asyncio.Event()


#: Of the request at hand; None: its answer isn't kept.
keeping: ContextVar[Keeping | None] = ContextVar("keeping", default=None)
