"""`Continuity`: that a stream goes on at another gateway where this one or its client is lost."""

from __future__ import annotations

from collections import deque

from inference.engine_client.client import get_engine_client
from inference.engine_client.flight import Known
from inference.engine_client.journal import OpenStream
from inference.engine_client.mailbox import Piece
from inference.generation.output import OutputState
from inference.generation.takeover import (
    Taken,
    holder_of,
    read_until,
    settle_later,
    take_over_stream,
)
from inference.request.job import Job, Usage
from inference.request.position import MAX_OUTPUTS, Position
from metering.access import GATEWAY, Admission


def can_go_on_elsewhere(job: Job) -> bool:
    """Whether it's written down what it comes to: a stream of so few outputs that it has ids."""
    return job.stream and len(job.prompts) * job.sampling.num_sequences <= MAX_OUTPUTS


class Continuity:
    """What this gateway writes down of a stream for others, and what it took over from another.

    Attributes:
        kept: whether another gateway could go on with it.
        replaying: whether what was produced elsewhere is being told.
    """

    def __init__(self, job: Job, taken: Taken | None = None) -> None:
        """`taken`: the stream that this gateway goes on with; None: it began here."""
        self._job, self._taken = job, taken
        self.kept = can_go_on_elsewhere(job)
        self.replaying = self._has_told = False
        self._left: deque[list[Piece]] = deque()
        if taken is not None:
            parts = (taken.told(), taken.partly_told(), taken.untold())
            self._left.extend(pieces for pieces in parts if pieces)

    # -- what was produced elsewhere ----------------------------------------------------------

    @property
    def position(self) -> Position | None:
        """Where the client is that had begun to read at another gateway."""
        return None if self._taken is None else self._taken.position

    @property
    def has_told_tokens(self) -> bool:
        """Whether the first news are what the client has already."""
        return self._taken is not None and bool(self._taken.told())

    @property
    def known(self) -> Known | None:
        """For the engine client."""
        return None if self._taken is None else self._taken.as_known

    def replay(self) -> list[Piece] | None:
        """The next of it; None: all has been told."""
        self.replaying = bool(self._left)
        return self._left.popleft() if self._left else None

    def lacks_end(self, outputs: list[list[OutputState]]) -> bool:
        """Whether the client was told an output's end that isn't known here once all of it has been
        replayed: nothing would ever come of that output.
        """
        if (taken := self._taken) is None or not self.replaying or self._left:
            return False
        return any(
            output.finish_reason is None and taken.ended(output.number, output.index)
            for each in outputs
            for output in each
        )

    # -- what others would need ---------------------------------------------------------------

    @property
    def stream(self) -> str:
        """The name under which pieces are noted; "": they aren't."""
        return self._job.request_id if self.kept else ""

    def begin(self, fingerprint: bytes, admission: Admission) -> None:
        """Write down what the stream is; `fingerprint`: see `request_print`."""
        if not self.kept:
            return
        job, client, taken = self._job, get_engine_client(), self._taken
        about = OpenStream(
            tenant_id=job.caller.tenant_id,
            holder=holder_of(job.caller),
            print=fingerprint,
            gateway=GATEWAY,
            ledger_id="" if taken is None else taken.ledger_id,
            outbox=client.gateway_id,
            requests=job.engine_ids,
            started_at=job.started_at,
            seed=job.sampling.seed or 0,
            output_tokens=admission.output_tokens,
            read_until=read_until(),
            adapter=job.served.adapter,
        )
        client.journal.begin(job.request_id, about)
        for piece in () if taken is None else (one for each in taken.known for one in each):
            client.journal.note(job.request_id, 0, piece)

    def note_told(self) -> None:
        """From now on the stream is billed, should this gateway die."""
        if not self._has_told and self.kept:
            get_engine_client().journal.told(self._job.request_id)
        self._has_told = True

    # -- who bills it -------------------------------------------------------------------------

    @property
    def ledger_id(self) -> str:
        """Under which the ledger has what this gateway settles."""
        return self._job.request_id if self._taken is None else self._taken.ledger_id

    @property
    def billed(self) -> Usage:
        """What another gateway has settled of it."""
        return (None if self._taken is None else self._taken.billed) or Usage()

    async def settled(self, usage: Usage) -> Usage:
        """Write down what all of it comes to; what of that is left for this gateway to settle."""
        if self.kept:
            journal = get_engine_client().journal
            name = self._job.request_id
            await journal.settled(name, usage.prompt_tokens, usage.completion_tokens)
        if self._taken is None or self._taken.billed is None:
            return usage
        return usage.without(self._taken.billed)


async def take_over(job: Job, position: Position, fingerprint: bytes) -> tuple[Admission, Taken]:
    """Take a stream over from another gateway; `job` becomes what that one ran.

    Raises what `take_over_stream` and `admit` raise.
    """
    client = get_engine_client()
    taken = await take_over_stream(client, job, position, fingerprint)
    job.request_id, job.started_at = position.stream, taken.about.started_at
    job.sampling.seed = taken.about.seed
    job.served = job.served.through(taken.about.adapter)
    return await settle_later(client, job, taken), taken
