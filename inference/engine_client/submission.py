"""`Submission`: what a caller holds of the requests that it handed in together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from inference.engine_client.flight import InFlightRequest
from inference.engine_client.mailbox import TokenChunk, TokenQueue

if TYPE_CHECKING:
    from inference.engine_client.client import EngineClient


class Submission:
    """One or more engine requests whose pieces come through one mailbox.

    Close it in a `finally`: that aborts what still runs.

    Attributes:
        mailbox: where the pieces come from.
        flights: the requests on their way, in order. Of thousands the last ones follow soon.
        closed: whether nobody waits for it any more.
    """

    def __init__(self, client: EngineClient, mailbox: TokenQueue) -> None:
        self._client, self.mailbox = client, mailbox
        self.flights: list[InFlightRequest] = []
        self.closed = False

    def next_chunks(self, wait_s: float | None = None) -> Awaitable[list[TokenChunk]]:
        """The next pieces, at most one an output; [] after `wait_s` seconds without any.

        Raises: `QuireError` of the engine, or `EngineUnavailable`.
        """
        return self.mailbox.get(wait_s)

    def num_tokens(self, number: int, index: int) -> int:
        """Tokens of an output that have reached this gateway."""
        return len(self.flights[number].tokens[index]) if number < len(self.flights) else 0

    @property
    def replica_id(self) -> str:
        """The replica that has the first request, or had it last; "" while none had it."""
        return self.flights[0].last_replica_id

    @property
    def waiting(self) -> bool:
        """Whether a request that isn't over waits for a replica that could take it."""
        return any(not flight.placed and not flight.done for flight in self.flights)

    def was_computed(self, number: int) -> bool:
        """Whether the engine has computed anything for this request, as far as is known."""
        return number < len(self.flights) and self.flights[number].ran

    @property
    def numerics_changed(self) -> bool:
        """Whether a replica that computes other bits went on with any of them."""
        return any(flight.numerics_changed for flight in self.flights)

    def finish_output(self, number: int, index: int) -> None:
        """The consumer needs no more of this output (a stop string was found): abort it."""
        self._client.abort_output(self.flights[number], index, "stop")

    def close(self) -> None:
        """Abort what has not finished. Idempotent, never blocks."""
        self.closed = True
        self.mailbox.close()
        for flight in self.flights:
            self._client.abort_all(flight)

    async def wait_aborted(self, timeout_s: float) -> None:
        """After `close`: wait until the engine has answered the aborts, for at most so long."""
        for flight in self.flights:
            if flight.abort_future is not None:
                await asyncio.wait([flight.abort_future], timeout=timeout_s)

    async def wait_records(self, timeout_s: float) -> None:
        """Wait until the engine's records of what ended early are there, for at most so long."""
        waiting = [each.records_ready for each in self.flights if each.records_ready is not None]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)
