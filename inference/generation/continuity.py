"""`StreamContinuity`: lets another gateway continue a stream whose gateway or client leaves."""

from __future__ import annotations

from collections import deque

from inference.engine_client.client import get_engine_client
from inference.engine_client.flight import ResumeState
from inference.engine_client.journal import OpenStream
from inference.engine_client.mailbox import TokenChunk
from inference.generation.output import OutputState
from inference.generation.takeover import (
    TakenOverStream,
    defer_settlement,
    stream_owner,
    take_over_stream,
)
from inference.request.job import Job, Usage
from inference.request.position import MAX_OUTPUTS, StreamPosition
from metering.access import GATEWAY, Admission


def is_resumable(job: Job) -> bool:
    """Whether the stream is journaled: its outputs are few enough for event ids."""
    return job.stream and len(job.prompts) * job.sampling.num_sequences <= MAX_OUTPUTS


class StreamContinuity:
    """Journal of a stream for other gateways, and the state taken over from one.

    Attributes:
        is_journaled: whether another gateway can continue the stream.
        replaying: whether `replayed_chunks` still returns tokens from the previous gateway.
    """

    def __init__(self, job: Job, taken_over: TakenOverStream | None = None) -> None:
        """`taken_over`: another gateway's stream, which this one continues."""
        self._job, self._taken_over = job, taken_over
        self.is_journaled = is_resumable(job)
        self.replaying = self._has_delivered = False
        self._pending_chunks: deque[list[TokenChunk]] = deque()
        if taken_over is not None:
            parts = (
                taken_over.delivered(),
                taken_over.partially_delivered(),
                taken_over.undelivered(),
            )
            self._pending_chunks.extend(chunks for chunks in parts if chunks)

    @property
    def position(self) -> StreamPosition | None:
        """The position at which the client resumed a stream; None for a new stream."""
        return None if self._taken_over is None else self._taken_over.position

    @property
    def has_delivered_tokens(self) -> bool:
        """Whether the first chunks were already received by the client."""
        return self._taken_over is not None and bool(self._taken_over.delivered())

    @property
    def resume_state(self) -> ResumeState | None:
        """State for the engine client to resume from."""
        return None if self._taken_over is None else self._taken_over.to_resume_state

    def replayed_chunks(self) -> list[TokenChunk] | None:
        """Return the next chunks from the previous gateway; None once all were returned."""
        self.replaying = bool(self._pending_chunks)
        return self._pending_chunks.popleft() if self._pending_chunks else None

    def is_missing_end(self, outputs: list[list[OutputState]]) -> bool:
        """Whether the client received the end of an output that the journal lacks, with nothing
        left to replay: no more tokens of that output would arrive.
        """
        if (taken_over := self._taken_over) is None or not self.replaying or self._pending_chunks:
            return False
        return any(
            output.finish_reason is None and taken_over.is_finished(output.number, output.index)
            for prompt_outputs in outputs
            for output in prompt_outputs
        )

    @property
    def stream(self) -> str:
        """The stream's name in the journal; "" if it isn't journaled."""
        return self._job.request_id if self.is_journaled else ""

    def begin(self, fingerprint: bytes, admission: Admission) -> None:
        """Journal the stream's description; `fingerprint`: see `request_fingerprint`."""
        if not self.is_journaled:
            return
        job, client, taken_over = self._job, get_engine_client(), self._taken_over
        about = OpenStream(
            tenant_id=job.caller.tenant_id,
            holder=stream_owner(job.caller),
            print=fingerprint,
            gateway=GATEWAY,
            ledger_id="" if taken_over is None else taken_over.ledger_id,
            outbox=client.gateway_id,
            requests=job.engine_ids,
            started_at=job.started_at,
            seed=job.sampling.seed or 0,
            output_tokens=admission.output_tokens,
            read_until=job.ctx.read_until,
            adapter=job.model.adapter,
        )
        client.journal.begin(job.request_id, about)
        for chunk in (
            ()
            if taken_over is None
            else (chunk for outputs in taken_over.received for chunk in outputs)
        ):
            client.journal.record_tokens(job.request_id, 0, chunk)

    def mark_delivered(self) -> None:
        """Have the stream billed from now on if this gateway dies."""
        if not self._has_delivered and self.is_journaled:
            get_engine_client().journal.mark_delivered(self._job.request_id)
        self._has_delivered = True

    @property
    def ledger_id(self) -> str:
        """The ledger's id of the usage that this gateway settles."""
        return self._job.request_id if self._taken_over is None else self._taken_over.ledger_id

    @property
    def billed(self) -> Usage:
        """Usage that other gateways have settled."""
        return (None if self._taken_over is None else self._taken_over.billed) or Usage()

    async def settled(self, usage: Usage) -> Usage:
        """Journal the total usage; return the part that this gateway settles."""
        if self.is_journaled:
            journal = get_engine_client().journal
            name = self._job.request_id
            await journal.mark_settled(name, usage.prompt_tokens, usage.completion_tokens)
        if self._taken_over is None or self._taken_over.billed is None:
            return usage
        return usage.subtract(self._taken_over.billed)


async def take_over_generation(
    job: Job, position: StreamPosition, fingerprint: bytes
) -> tuple[Admission, TakenOverStream]:
    """Take a stream over from another gateway, and give `job` its id, start, seed and adapter.

    Raises what `take_over_stream` and `admit` raise.
    """
    client = get_engine_client()
    taken_over = await take_over_stream(client, job, position, fingerprint)
    job.request_id, job.started_at = position.stream, taken_over.about.started_at
    job.sampling.seed = taken_over.about.seed
    job.model = job.model.with_adapter(taken_over.about.adapter)
    return await defer_settlement(client, job, taken_over), taken_over
