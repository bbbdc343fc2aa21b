"""`InFlightRequest`: an engine request on its way, over as many replicas as it takes. `Submission`:
the requests of one caller."""

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
    """[prompt][output] tokens, and whether an output is over; `bits`: [prompt], what made them;
    `epoch`: how often it was taken up.

    Engines know the requests by other ids in each epoch.
    """

    tokens: Sequence[Sequence[list[int]]]
    finished: Sequence[Sequence[bool]]
    bits: Sequence[Bits]
    epoch: int

    def for_prompt(self, number: int) -> tuple[Sequence[list[int]], Sequence[bool], Bits, int]:
        """Resume state of one prompt."""
        return self.tokens[number], self.finished[number], self.bits[number], self.epoch


#: Of one flight: changes of replica that are remembered.
MAX_HOPS = 20
#: After so many replicas in a row that died over a step of it among others, without a token in
#: between, it runs in steps of its own: then a death says who is to blame.
MAX_SHARED_CRASHES = 2


class LostTokens(Exception):
    """An outbox entry never came: the tokens after what we have begin too late."""


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A request, what it has produced so far, and where it runs now.

    Each attempt has an id of its own (`<request id>~<attempt>` from the second on), so what an
    earlier attempt still sends can't be taken for the present one's.

    Attributes:
        request: as first submitted. number: its place in the submission.
        mailbox: where pieces go. model: the served model's name. key: for prefix affinity.
        tokens: [num outputs][num tokens so far]. finished: [num outputs].
        replica_id, incarnation: where it runs; "" while it waits for a replica.
        last_replica_id: where it runs or ran last.
        attempt: how often it was given to a replica. charged_attempts: the same but those that
        ended for no
            fault of its own. attempts_without_output: how many of these in a row brought no token,
            and weren't
            ended by the death of a replica that was at others' requests as well. resumed: the
            present one goes on from tokens.
        shared_crashes: replicas in a row that died while they were at this request and others, and
        it
            had no token of any. runs_isolated: it runs in steps of its own now.
        numerics: of the replica that made the latest tokens; None: none did, or it isn't known.
        numerics_changed: whether a replica with others went on with tokens that were there.
        waiting_since: monotonic, while it waits.
        last_heard_at: monotonic, when it was placed or last heard of.
        ran: whether an engine has computed anything for it.
        stream: under which name its tokens are kept for other gateways, "": they aren't.
        takeover_count: how often another gateway had taken it up before.
        unresolved_replicas: incarnations that it left without knowing what became of them, since
        its last
            token, and whether it was isolated there.
        abort_future: set when it was abandoned; done when the engine has answered the abort.
        records: of the engine, by output, as far as they came. records_ready: set when it ended
        here before
            the engine said so; done when all records are there.
        is_prefilling: the present attempt computes its prompt alone, on a prefill replica.
        prefilled: a prefill replica has had it; whether or not that came to its end, none is asked
        again. kv_peer: where that serves the prompt's blocks; "": nowhere.
        num_prefill_cached_tokens: prompt tokens that the prefill replica had cached.
        placement_history: when it was given to which replica, or taken away for a reason
        (`time.perf_counter`).
        log_fields: of the lines about it, which others' tasks write as well.
    """

    request: EngineRequest
    number: int
    mailbox: TokenQueue
    model: str
    key: bytes
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
    is_prefilling: bool = False
    prefilled: bool = False
    kv_peer: str = ""
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
        """The id under which the present attempt runs."""
        name = self.request.request_id
        if self.takeover_count:
            name = f"{name}~{self.takeover_count}.{self.attempt}"
        elif self.attempt > 1:
            name = f"{name}~{self.attempt}"
        return prefill_request_id(name) if self.is_prefilling else name

    def resume_from(
        self, tokens: Sequence[list[int]], finished: Sequence[bool], bits: Bits, epoch: int
    ) -> None:
        """Go on with what another gateway had."""
        self.numerics, self.numerics_changed = bits
        self.tokens = [list(token_ids) for token_ids in tokens]
        self.finished, self.takeover_count = list(finished), epoch
        self.ran = self.prompt_logprobs_seen = self.has_output

    @property
    def replica_state(self) -> Bits:
        """Numerics of the replicas that made its tokens, for another gateway."""
        return self.numerics, self.numerics_changed

    @property
    def placed(self) -> bool:
        """Whether a replica has it."""
        return bool(self.replica_id)

    @property
    def done(self) -> bool:
        """Whether every output has finished."""
        return all(self.finished)

    @property
    def has_output(self) -> bool:
        """Whether there are tokens to go on from."""
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

    def assign_prefill(self, beat: Heartbeat, kv_peer: str) -> EngineRequest:
        """Begin an attempt that computes the prompt alone; the message to send.

        `kv_peer`: where the replica serves its blocks.
        """
        self.is_prefilling = self.prefilled = True
        self.kv_peer = kv_peer
        self._begin_attempt(beat)
        return msgspec.structs.replace(
            self.request,
            request_id=self.engine_id,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            token_cap=None,
            isolated=self.runs_isolated,
        )

    def finish_prefill(self, delta: TokenDelta) -> None:
        """The prefill replica has computed the prompt, or won't."""
        self.num_prefill_cached_tokens = delta.num_cached_tokens
        self.ran = self.ran or delta.finish_reason != "error"
        self.refund_attempt()

    def assign(self, beat: Heartbeat, peers: Collection[str]) -> EngineRequest:
        """Begin an attempt at a replica; the message to send: prompt and tokens so far.

        `peers`: where replicas serve their blocks: none is asked that isn't among them, since
        clients may name any.
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
            prefilled=self.prefilled,
            kv_peer=self.kv_peer if self.kv_peer in peers else "",
        )

    def _begin_attempt(self, beat: Heartbeat) -> None:
        """It is given to a replica."""
        self.attempt += 1
        self.replica_id, self.incarnation = beat.replica_id, beat.incarnation
        self.last_replica_id = beat.replica_id
        self._hop("")
        self.last_heard_at = time.monotonic()
        self.charged_attempts += 1
        self.attempts_without_output += 1
        # What isn't known yet may turn out to have been a death in company.
        self.runs_isolated = (
            self.shared_crashes + len(self.unresolved_replicas) >= MAX_SHARED_CRASHES
        )

    @property
    def has_all_records(self) -> bool:
        """Whether the engine's records of all outputs are there."""
        return len(self.records) >= len(self.finished)

    def await_records(self) -> None:
        """It ends here before the engine has said so, and what that says is still wanted."""
        self.last_heard_at = time.monotonic()
        self.records_ready = asyncio.get_running_loop().create_future()

    def refund_attempt(self) -> None:
        """Refund the current attempt: neither the request nor its replica is to blame."""
        self.charged_attempts = max(0, self.charged_attempts - 1)
        self.attempts_without_output = max(0, self.attempts_without_output - 1)

    def suspect(self) -> None:
        """It leaves its replica, and what became of that isn't known yet."""
        self.unresolved_replicas[self.incarnation] = self.runs_isolated

    def blame(self, request_ids: Collection[str] | None, incarnation: str) -> None:
        """A replica that had it died, or stands still, while it was at these requests.

        `request_ids`: without the numbers of attempts; None: not known, and then it counts.
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
        """It comes to its replica, or leaves it for a reason."""
        if len(self.placement_history) < MAX_HOPS:
            self.placement_history.append((time.perf_counter(), self.replica_id, reason))

    def unassign(self, reason: str) -> None:
        """No replica has it any more."""
        if self.placed:
            self._hop(reason)
        self.replica_id = self.incarnation = ""
        self.waiting_since = time.monotonic()

    def accept(self, delta: TokenDelta) -> TokenChunk | None:
        """Take in a delta of the present attempt; the new part of it, or None if there's none.

        Raises: `LostTokens` when tokens between are missing.
        """
        index = delta.index
        if delta.flight is not None:
            self.records[index] = delta.flight
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
            # A resumed request finds its own earlier tokens in the cache: that is no saving.
            chunk.num_cached_tokens = 0
        elif self.prefilled:
            # What came from the prefill replica was computed for this request.
            chunk.num_cached_tokens = min(chunk.num_cached_tokens, self.num_prefill_cached_tokens)
        if chunk.flight is not None:
            chunk.flight.numerics_changed = self.numerics_changed
        if delta.finish_reason:
            self.finished[index] = True
        return chunk

    def on_abort_reply(self, delta: TokenDelta | None) -> None:
        """The engine's last word after an abort, or None when it's waited for no more."""
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
        """Whether the batch comes from the very process that the flight was given to."""
        return batch.replica_id == self.replica_id and batch.incarnation == self.incarnation


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
        waiting = [
            flight.records_ready for flight in self.flights if flight.records_ready is not None
        ]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)
