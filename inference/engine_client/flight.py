"""`InFlightRequest`: an engine request, across all replicas that run it. `Submission`: the requests
of one caller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from common.log_context import request_fields
from engine.contract.messages import EngineRequest, FlightRecord, Heartbeat, OutboxBatch, TokenDelta
from engine.contract.redis_keys import prefill_request_id
from engine.contract.replica_state import Numerics
from engine.contract.sampling_params import SamplingParams
from inference.engine_client.journal import Bits
from inference.engine_client.mailbox import TokenChunk, TokenQueue, chunk_from_delta

if TYPE_CHECKING:
    from inference.engine_client.client import EngineClient


@dataclass(frozen=True, slots=True)
class ResumeState:
    """State from which a request is resumed: [prompt][output] tokens, and whether each output has
    finished; `bits`: [prompt] numerics that produced them; `epoch`: number of takeovers.

    Engines know the requests by different ids in each epoch.
    """

    tokens: Sequence[Sequence[list[int]]]
    finished: Sequence[Sequence[bool]]
    bits: Sequence[Bits]
    epoch: int

    def for_prompt(self, number: int) -> tuple[Sequence[list[int]], Sequence[bool], Bits, int]:
        return self.tokens[number], self.finished[number], self.bits[number], self.epoch


#: Maximum number of placements that a flight records.
MAX_HOPS = 20
#: After so many consecutive crashes of replicas that were running it together with other requests,
#: without a token in between, it runs in steps of its own: a further crash is then its own fault.
MAX_SHARED_CRASHES = 2


class LostTokens(Exception):
    """An outbox entry is missing: the received tokens begin after a gap."""


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A request, what it has produced so far, and where it runs now.

    Each attempt has its own id (`<request id>~<attempt>` from the second on), so that deltas of an
    earlier attempt can't be mistaken for those of the current one.

    Attributes:
        request: as first submitted. number: its index in the submission.
        mailbox: where chunks go. model: the served model's name.
        tokens: [num outputs][num tokens so far]. finished: [num outputs].
        replica_id, incarnation: where it runs; "" while it waits for a replica.
        last_replica_id: where it runs or ran last.
        attempt: number of times that it was assigned to a replica. charged_attempts: the same
            without attempts that ended through no fault of the request. attempts_without_output:
            how many of these in a row produced no token, apart from crashes that other requests
            may have caused. resumed: whether the current attempt continues from tokens.
        shared_crashes: consecutive replicas that died while they were running this request among
            others, without a token from any of them. runs_isolated: it now runs in steps of its
            own.
        numerics: of the replica that produced the latest tokens; None: no tokens, or unknown.
        numerics_changed: whether a replica with different numerics continued existing tokens.
        waiting_since: monotonic, while it waits.
        last_heard_at: monotonic, when it was assigned or last received a delta.
        ran: whether an engine has computed anything for it.
        stream: the name under which its tokens are journaled for other gateways, "" for none.
        takeover_count: number of earlier takeovers by another gateway.
        unresolved_replicas: incarnations that it left since its last token without knowing whether
            they had crashed, and whether it ran isolated there.
        abort_future: set when it was abandoned; done when the engine has replied to the abort.
        records: the engine's records by output, as far as received. records_ready: set when it
            ended here before the engine reported its end; done when all records have arrived.
        kv_transfer_params: what the replica's KV connector says for the answer.
        is_prefilling: the current attempt only computes its prompt, or encodes its media.
        prefilled, encoded: it was sent to a replica that does so, which happens only once even if
            that failed.
        kv_peer: the address that serves what the last of these has computed; "" for none.
        reader_id: the replica that reads what the current attempt computes for it; "" for none.
        num_prefill_cached_tokens: prompt tokens that the prefill replica had cached.
        placement_history: when it was assigned to which replica, or removed from it and why
            (`time.perf_counter`).
        log_fields: fields of log lines about it, which other tasks write as well.
    """

    request: EngineRequest
    number: int
    mailbox: TokenQueue
    model: str
    tokens: list[list[int]] = field(default_factory=list)
    finished: list[bool] = field(default_factory=list)
    replica_id: str = ""
    incarnation: str = ""
    last_replica_id: str = ""
    attempt: int = 0
    charged_attempts: int = 0
    attempts_without_output: int = 0
    shared_crashes: int = 0
    runs_isolated: bool = False
    resumed: bool = False
    numerics: Numerics | None = None
    numerics_changed: bool = False
    waiting_since: float = 0.0
    last_heard_at: float = 0.0
    ran: bool = False
    prompt_logprobs_seen: bool = False
    stream: str = ""
    takeover_count: int = 0
    unresolved_replicas: dict[str, bool] = field(default_factory=dict)
    abort_future: asyncio.Future[None] | None = None
    records: dict[int, FlightRecord] = field(default_factory=dict)
    records_ready: asyncio.Future[None] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    is_prefilling: bool = False
    prefilled: bool = False
    encoded: bool = False
    kv_peer: str = ""
    reader_id: str = ""
    num_prefill_cached_tokens: int = 0
    placement_history: list[tuple[float, str, str]] = field(default_factory=list)
    log_fields: dict[str, Any] = field(default_factory=request_fields)

    def __post_init__(self) -> None:
        count = self.request.sampling.num_sequences
        self.tokens = [[] for _ in range(count)]
        self.finished = [False] * count
        self.prefilled, self.kv_peer = self.request.prefilled, self.request.kv_peer
        self.waiting_since = time.monotonic()

    @property
    def engine_id(self) -> str:
        """The id of the current attempt."""
        name = self.request.request_id
        if self.takeover_count:
            name = f"{name}~{self.takeover_count}.{self.attempt}"
        elif self.attempt > 1:
            name = f"{name}~{self.attempt}"
        return prefill_request_id(name) if self.is_prefilling else name

    def resume_from(
        self, tokens: Sequence[list[int]], finished: Sequence[bool], bits: Bits, epoch: int
    ) -> None:
        """Continue from another gateway's tokens."""
        self.numerics, self.numerics_changed = bits
        self.tokens = [list(token_ids) for token_ids in tokens]
        self.finished, self.takeover_count = list(finished), epoch
        self.ran = self.prompt_logprobs_seen = self.has_output

    @property
    def replica_state(self) -> Bits:
        """Numerics of the replicas that produced its tokens, for another gateway."""
        return self.numerics, self.numerics_changed

    @property
    def placed(self) -> bool:
        """Whether it is assigned to a replica."""
        return bool(self.replica_id)

    @property
    def done(self) -> bool:
        """Whether every output has finished."""
        return all(self.finished)

    @property
    def has_output(self) -> bool:
        """Whether there are tokens to continue from."""
        return any(self.tokens) or any(self.finished)

    @property
    def can_be_prefilled(self) -> bool:
        """Whether a prefill replica may compute its prompt."""
        request = self.request
        return not (
            self.prefilled
            or self.has_output
            or request.pooling is not None
            or request.prompt_embeds is not None
            or request.sampling.prompt_logprobs is not None
        )

    def assign_prefill(
        self, beat: Heartbeat, kv_peer: str, peers: Collection[str]
    ) -> EngineRequest:
        """Start an attempt that only computes the prompt, up to its last media where the replica
        only encodes; return the message to send.

        `kv_peer`: the address at which the replica serves its blocks. `peers`: see `assign`.
        """
        request, self.is_prefilling = self.request, True
        was_encoded, encoder = self.encoded, self.kv_peer
        end, handover = len(request.prompt_token_ids), beat.kv_handover
        if handover is not None and handover.only_encodes:
            end = max((item.end for item in request.media), default=end)
            self.encoded = True
        else:
            self.prefilled = True
        self.kv_peer = kv_peer
        self._begin_attempt(beat)
        return msgspec.structs.replace(
            request,
            request_id=self.engine_id,
            prompt_token_ids=request.prompt_token_ids[:end],
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            token_cap=None,
            isolated=self.runs_isolated,
            prefilled=was_encoded,
            kv_peer=encoder if encoder in peers else "",
            do_remote_decode=self.prefilled,
        )

    def finish_prefill(self, delta: TokenDelta) -> None:
        """The prefill replica has computed the prompt, or failed to."""
        self.num_prefill_cached_tokens = delta.num_cached_tokens
        self.ran = self.ran or delta.finish_reason != "error"
        self.refund_attempt()

    def assign(self, beat: Heartbeat, peers: Collection[str]) -> EngineRequest:
        """Start an attempt on a replica; return the message to send: prompt and tokens so far.

        `peers`: addresses at which replicas serve their blocks. Clients may name any address, so
        only these are used.
        """
        self.is_prefilling = False
        self._begin_attempt(beat)
        self.resumed = self.has_output
        self.numerics_changed |= self.resumed and beat.numerics != self.numerics
        self.numerics = beat.numerics
        return msgspec.structs.replace(
            self.request,
            request_id=self.engine_id,
            resume_token_ids=[list(tokens) for tokens in self.tokens] if self.resumed else [],
            skip_indices=[index for index, done in enumerate(self.finished) if done],
            isolated=self.runs_isolated,
            prefilled=self.prefilled or self.encoded,
            kv_peer=self.kv_peer if self.kv_peer in peers else "",
        )

    def _begin_attempt(self, beat: Heartbeat) -> None:
        """Assign it to a replica."""
        self.attempt += 1
        self.replica_id, self.incarnation = beat.replica_id, beat.incarnation
        self.last_replica_id = beat.replica_id
        self._hop("")
        self.last_heard_at = time.monotonic()
        self.charged_attempts += 1
        self.attempts_without_output += 1
        # An unresolved replica may turn out to have crashed while running other requests too.
        self.runs_isolated = (
            self.shared_crashes + len(self.unresolved_replicas) >= MAX_SHARED_CRASHES
        )

    @property
    def has_all_records(self) -> bool:
        """Whether the engine's records of all outputs have arrived."""
        return len(self.records) >= len(self.finished)

    def await_records(self) -> None:
        """It ended here before the engine reported its end, and the report is still needed."""
        self.last_heard_at = time.monotonic()
        self.records_ready = asyncio.get_running_loop().create_future()

    def refund_attempt(self) -> None:
        """Refund the current attempt: neither the request nor its replica is to blame."""
        self.charged_attempts = max(0, self.charged_attempts - 1)
        self.attempts_without_output = max(0, self.attempts_without_output - 1)

    def suspect(self) -> None:
        """It leaves a replica that may have crashed."""
        self.unresolved_replicas[self.incarnation] = self.runs_isolated

    def blame(self, request_ids: Collection[str] | None, incarnation: str) -> None:
        """A replica that had it crashed, or stalled, while it was running these requests.

        `request_ids`: without attempt numbers; None: unknown, which charges the attempt.
        """
        isolated = self.unresolved_replicas.pop(incarnation, self.runs_isolated)
        if request_ids is None:
            return
        if self.request.request_id not in request_ids:
            self.refund_attempt()
        elif len(request_ids) > 1 and not isolated:
            self.shared_crashes += 1
            self.attempts_without_output = max(0, self.attempts_without_output - 1)

    def _hop(self, reason: str) -> None:
        """Record that it was assigned to a replica, or removed from it for a reason."""
        if len(self.placement_history) < MAX_HOPS:
            self.placement_history.append((time.perf_counter(), self.replica_id, reason))

    def unassign(self, reason: str) -> None:
        """Remove it from its replica."""
        if self.placed:
            self._hop(reason)
        self.replica_id = self.incarnation = self.reader_id = ""
        self.waiting_since = time.monotonic()

    def accept(self, delta: TokenDelta) -> TokenChunk | None:
        """Apply a delta of the current attempt; return its new part, or None if there is none.

        Raises: `LostTokens` when tokens in between are missing.
        """
        index = delta.index
        if delta.flight is not None:
            self.records[index] = delta.flight
        self.kv_transfer_params = delta.kv_transfer_params or self.kv_transfer_params
        if not 0 <= index < len(self.tokens) or self.finished[index]:
            return None
        tokens = self.tokens[index]
        skip = len(tokens) - delta.start
        if skip < 0:
            raise LostTokens
        if delta.token_ids and skip >= len(delta.token_ids) and not delta.finish_reason:
            return None
        self.last_heard_at = time.monotonic()
        self.ran = True
        chunk = chunk_from_delta(delta, self.number, min(skip, len(delta.token_ids)))
        tokens.extend(chunk.token_ids)
        if chunk.prompt_logprobs is not None:
            if self.prompt_logprobs_seen:
                chunk.prompt_logprobs = None
            self.prompt_logprobs_seen = True
        if chunk.token_ids:
            self.attempts_without_output = self.shared_crashes = 0
            self.unresolved_replicas.clear()
        if self.resumed:
            # A resumed request hits its own earlier tokens in the cache: that saves nothing.
            chunk.num_cached_tokens = 0
        elif self.prefilled or self.encoded:
            # The prefill replica computed these blocks for this very request.
            chunk.num_cached_tokens = min(chunk.num_cached_tokens, self.num_prefill_cached_tokens)
        if chunk.flight is not None:
            chunk.flight.numerics_changed = self.numerics_changed
        if delta.finish_reason:
            self.finished[index] = True
        return chunk

    def on_abort_reply(self, delta: TokenDelta | None) -> None:
        """The engine's reply to an abort, or None when waiting for it has timed out."""
        record = delta.flight if delta is not None else None
        self.ran = self.ran or (record is not None and record.num_steps > 0)
        if delta is not None:
            self.records.setdefault(delta.index, record or FlightRecord())
        if (
            self.records_ready is not None
            and not self.records_ready.done()
            and (delta is None or self.has_all_records)
        ):
            self.records_ready.set_result(None)
        if self.abort_future is not None and not self.abort_future.done():
            self.abort_future.set_result(None)

    def runs_at(self, batch: OutboxBatch) -> bool:
        """Whether the batch comes from the very process that the flight was assigned to."""
        return batch.replica_id == self.replica_id and batch.incarnation == self.incarnation


class Submission:
    """One or more engine requests whose chunks arrive through one mailbox.

    Close it in a `finally`: that aborts requests that still run.

    Attributes:
        mailbox: the source of the chunks.
        flights: the requests, in order. In a submission of thousands the last ones are added later.
        closed: whether its reader has left.
    """

    def __init__(self, client: EngineClient, mailbox: TokenQueue) -> None:
        self._client, self.mailbox = client, mailbox
        self.flights: list[InFlightRequest] = []
        self.closed = False

    def next_chunks(self, wait_s: float | None = None) -> Awaitable[list[TokenChunk]]:
        """The next chunks, at most one per output; [] after `wait_s` seconds without any.

        Raises: `QuireError` of the engine, or `EngineUnavailable`.
        """
        return self.mailbox.get(wait_s)

    def num_tokens(self, number: int, index: int) -> int:
        """Tokens of an output that have reached this gateway."""
        return len(self.flights[number].tokens[index]) if number < len(self.flights) else 0

    @property
    def replica_id(self) -> str:
        """The first request's current or last replica; "" before it was assigned to one."""
        return self.flights[0].last_replica_id

    @property
    def waiting(self) -> bool:
        """Whether an unfinished request waits for a replica."""
        return any(not flight.placed and not flight.done for flight in self.flights)

    def was_computed(self, number: int) -> bool:
        """Whether the engine is known to have computed anything for this request."""
        return number < len(self.flights) and self.flights[number].ran

    @property
    def numerics_changed(self) -> bool:
        """Whether a replica with different numerics continued any of them."""
        return any(flight.numerics_changed for flight in self.flights)

    def finish_output(self, number: int, index: int) -> None:
        """Abort an output that the consumer has ended (a stop string matched)."""
        self._client.abort_output(self.flights[number], index, "stop")

    def close(self) -> None:
        """Abort unfinished requests. Idempotent, never blocks."""
        self.closed = True
        self.mailbox.close()
        for flight in self.flights:
            self._client.abort_all(flight)

    async def wait_aborted(self, timeout_s: float) -> None:
        """After `close`: wait up to `timeout_s` seconds for the engine's replies to the aborts."""
        for flight in self.flights:
            if flight.abort_future is not None:
                await asyncio.wait([flight.abort_future], timeout=timeout_s)

    async def wait_records(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for the engine's records of outputs that ended early."""
        waiting = [
            flight.records_ready for flight in self.flights if flight.records_ready is not None
        ]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)
