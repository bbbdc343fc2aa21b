"""`EngineClient`: hands requests to replicas and their tokens back, whatever happens between."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from django.conf import settings
from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.log_context import bound_request, detached
from common.loops import keep_running
from engine.contract.errors import EngineFault, EngineOverloaded, EngineUnavailable, QuireError
from engine.contract.messages import (
    ABORTED_BY_OPERATOR,
    ControlRequest,
    EngineRequest,
    OutboxBatch,
    TokenDelta,
)
from engine.system.redis_client import async_client
from inference.engine_client.commands import ReplicaCommands
from inference.engine_client.failover import FailoverMonitor
from inference.engine_client.fleet import (
    Fleet,
    ReplicaEventReader,
    choose_replica,
    failover_candidates,
    prefix_key,
)
from inference.engine_client.flight import InFlightRequest, LostTokens, ResumeState, Submission
from inference.engine_client.handover import PrefillPlanner
from inference.engine_client.journal import Journal
from inference.engine_client.mailbox import TokenQueue
from inference.engine_client.queue_limit import Load, QueueLimit, check_client_timeout
from inference.engine_client.redis_streams import (
    InboxWriter,
    OutboxReader,
    reading_link,
    short_link,
)
from inference.errors import GatewayShuttingDown, Overloaded, RemoteError
from inference.loop.fair_dispatch import iterate_cooperatively
from inference.metrics.flusher import Flusher, flush

logger = logging.getLogger(__name__)

#: Requests of one submission that are placed in one turn of the event loop.
MAX_PLACED_PER_TICK = 16
#: Answers of one step that are begun as it arrives.
MAX_STARTED_PER_TICK = 32
#: For how long after a refusal the next one is expected.
RECENT_REJECTION_S = 2.0
#: Of a prompt of vectors, what says which replica may have its beginning.
MAX_EMBEDS_BYTES = 16_384


class EngineClient:
    """One an event loop. All methods are called on that loop.

    Attributes:
        gateway_id: this process's name; its outbox is called after it.
        fleet: the replicas as last heard.
        settings: those that it started with.
    """

    def __init__(self, url: str | None = None) -> None:
        self.settings = settings.QUIRE
        self.gateway_id = uuid.uuid4().hex
        url = url or settings.REDIS_URL
        self._redis = async_client(url)
        self._link, self._reading = short_link(url), reading_link(url)
        prefix = self.settings.key_prefix
        self.fleet = Fleet(self._redis, prefix)
        self._inbox = InboxWriter(self._link, prefix)
        self._flights: dict[str, InFlightRequest] = {}
        self._queue_bound = QueueLimit()
        self._prefill_planner = PrefillPlanner()
        self._refused_at = -math.inf
        self._leaving: dict[str, InFlightRequest] = {}
        self.controls = ReplicaCommands()
        self.watchman = FailoverMonitor(self)
        self.journal = Journal(self._link, prefix)
        self.outbox = OutboxReader(
            self._reading,
            self._link,
            self.gateway_id,
            prefix,
            self._on_batch,
            self._dispatch_batch,
            self.journal.save,
            self.watchman.mark_redis_suspect,
        )
        self.flusher = Flusher(self._redis, prefix, f"gateway-{self.gateway_id[:12]}")
        self._news = ReplicaEventReader(self._redis, prefix, self.watchman.on_replica_event)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started: asyncio.Task[None] | None = None
        self._failing = self._closed = False

    async def start(self) -> None:
        """Start reading. Idempotent; waits for the first look at the replicas."""
        task = self._started
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            with detached():
                task = self._started = asyncio.create_task(self._start())
        await asyncio.shield(task)

    async def _start(self) -> None:
        await self.watchman.tick()
        for loop, run in (
            ("watchman", self.watchman.run),
            ("outbox reader", self.outbox.run),
            ("outbox trimmer", self.outbox.trim_forever),
            ("replica events", self._news.run),
            ("metrics flusher", self.flusher.run),
        ):
            self.spawn(keep_running(loop, run))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in the background until it ends or the client is closed."""
        with detached():
            task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._retire)

    def _retire(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("The engine client's background work failed.", exc_info=error)

    async def close(self) -> None:
        """Abort what is open and stop reading."""
        if self._closed:
            return
        self._closed = True
        self.fail_all()
        for flight in list(self._flights.values()):
            self.abort_all(flight)
        self.expire_aborted(-1.0)
        await self._inbox.close()
        # Again and again: below the Redis client, Python 3.11's wait_for swallows some.
        while pending := [task for task in self._tasks if not task.done()]:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=0.1)
        # Metrics are a second old at most, and the outbox expires by itself.
        with contextlib.suppress(RedisError):
            await flush(self._redis, self.settings.key_prefix)
            await self.journal.save()
            await self.outbox.delete()
        await self._reading.close()
        await self._link.close()
        await self._redis.aclose()

    def fail_all(self) -> None:
        """Fail what is open, and whatever is submitted from now on: the process ends.

        Readers still tell their clients so and abort their requests, which the end of their tasks
        would prevent.
        """
        self._failing = True
        for flight in self._flights.values():
            flight.mailbox.fail(GatewayShuttingDown())

    def submit(
        self,
        requests: Iterable[EngineRequest],
        model: str,
        *,
        tenant: str = "",
        stream: str = "",
        resume_state: ResumeState | None = None,
    ) -> Submission:
        """Hand in requests that belong together; pieces carry a request's place in the list.

        Args:
            tenant: whose they are.
            stream: under which name they are kept for other gateways; "": they aren't.
            resume_state: what another gateway had of them; only what comes behind it is handed out.

        Never fails by itself: without a replica the submission waits, and then raises
        `EngineUnavailable` at its reader; at the process's end `GatewayShuttingDown`.
        """
        submission = Submission(self, TokenQueue(tenant))
        if self._failing:
            submission.mailbox.fail(GatewayShuttingDown())
        self._assign_next(
            submission, self._flights_of(submission, requests, model, stream, resume_state)
        )
        return submission

    def _flights_of(
        self,
        submission: Submission,
        requests: Iterable[EngineRequest],
        model: str,
        stream: str,
        resume_state: ResumeState | None,
    ) -> Iterator[InFlightRequest]:
        for number, request in enumerate(requests):
            request.gateway_id = self.gateway_id
            scope = request.cache_namespace + request.adapter_digest
            if request.prompt_embeds is not None:
                scope += hashlib.sha256(request.prompt_embeds.data[:MAX_EMBEDS_BYTES]).hexdigest()
            scope += "".join(item.digest.hex() for item in request.media)
            key = prefix_key(request.prompt_token_ids, scope)
            flight = InFlightRequest(request, number, submission.mailbox, model, key, stream=stream)
            if resume_state is not None:
                flight.resume_from(*resume_state.for_prompt(number))
            yield flight

    def _assign_next(self, submission: Submission, flights: Iterator[InFlightRequest]) -> None:
        """Place the first of those that are left; others' tokens come before the next."""
        if submission.closed or self._closed:
            return
        turn = list(islice(flights, MAX_PLACED_PER_TICK))
        submission.flights.extend(turn)
        unfinished = [flight for flight in turn if not flight.done]
        # Should placing one fail, the watchman places these.
        self._flights.update((flight.engine_id, flight) for flight in unfinished)
        try:
            for flight in unfinished:
                self.try_assign(flight)
            self._link.flush()  # a turn of the loop is long while many begin
        finally:
            if len(turn) == MAX_PLACED_PER_TICK:
                loop = asyncio.get_running_loop()
                loop.call_soon(self._assign_next, submission, flights)

    def check_queue(self, model: str, tenant: str, priority: int, *, timeout_s: float) -> None:
        """Raise what `QueueLimit` does when too much waits for the model, or for a client that
        waits `timeout_s` seconds.
        """
        load = Load.of(self.fleet.of_model(model))
        try:
            check_client_timeout(model, load, timeout_s)
            self._queue_bound.check(model, tenant, priority, load, self._flights.values())
        except (Overloaded, EngineOverloaded):
            self._refused_at = time.monotonic()
            raise

    @property
    def rejected_recently(self) -> bool:
        """Whether `check_queue` had to refuse something a moment ago."""
        return time.monotonic() - self._refused_at < RECENT_REJECTION_S

    def check_any_queue(self, models: Iterable[str], tenant: str, priority: int) -> None:
        """Raise what `check_queue` does for the last of the models, if it does for all."""
        refusal: Overloaded | EngineOverloaded | None = None
        for model in models:
            load = Load.of(self.fleet.of_model(model))
            try:
                self._queue_bound.check(model, tenant, priority, load, self._flights.values())
            except (Overloaded, EngineOverloaded) as error:
                refusal = error
            else:
                return
        if refusal is not None:
            raise refusal

    def try_assign(self, flight: InFlightRequest) -> bool:
        """Give a waiting flight to a ready replica, if there's one."""
        slack = self.settings.affinity_slack
        of_model = self.fleet.of_model(flight.model)
        replicas = failover_candidates(flight, of_model)
        replica = choose_replica(
            replicas,
            flight.key,
            slack,
            flight.request.adapter_digest,
            self.settings.local_replica_id,
        )
        if replica is None:
            return False
        self._flights.pop(flight.engine_id, None)
        prefill = self._prefill_planner.choose(flight, replicas, replica, slack)
        if prefill is not None:
            replica = prefill
            message = flight.assign_prefill(prefill.heartbeat, prefill.kv_address)
        else:
            peers = {peer.kv_address for peer in of_model}
            message = flight.assign(replica.heartbeat, peers)
        beat = replica.heartbeat
        self._flights[flight.engine_id] = flight
        if flight.stream and prefill is None:
            self.journal.record_placement(flight.stream, flight.number, flight.replica_state)
        replica.submitted += 1
        attempt = flight.attempt
        try:
            self._inbox.post(
                beat.replica_id, message, lambda _: self._on_send_failed(flight, attempt)
            )
        except (OverflowError, TypeError, ValueError):  # msgspec's, of what no message can hold
            # No other try ends otherwise, and whoever waits for it must hear of it.
            with bound_request(**flight.log_fields):
                logger.exception("Request %s can't be written.", flight.engine_id)
            self.fail(flight, EngineFault("The request can't be sent to an engine."))
        return True

    def _on_send_failed(self, flight: InFlightRequest, attempt: int) -> None:
        """Redis did not take it. It is placed again after the next good look at Redis."""
        if flight.attempt == attempt and flight.placed and not flight.done:
            flight.refund_attempt()
            self._drop_replica(flight, "Redis did not take it")

    def _on_batch(self, batch: OutboxBatch) -> None:
        """Hand out what begins answers, of a batch that arrives just now: whoever has no token yet
        has waited longest. The rest of the batch, and of very many of these, is for
        `_dispatch_batch`.
        """
        first = [delta for delta in batch.deltas if not delta.start][:MAX_STARTED_PER_TICK]
        if first:
            delivered = set(map(id, first))
            batch.deltas = [delta for delta in batch.deltas if id(delta) not in delivered]
            for delta in first:
                self._dispatch_delta(batch, delta)

    async def _dispatch_batch(self, batch: OutboxBatch) -> None:
        for reply in batch.replies:
            self.controls.on_reply(reply)
        # A step may have thousands.
        async for delta in iterate_cooperatively(sorted(batch.deltas, key=_goes_on)):
            self._dispatch_delta(batch, delta)

    def _dispatch_delta(self, batch: OutboxBatch, delta: TokenDelta) -> None:
        flight = self._flights.get(delta.request_id)
        if flight is None or not flight.placed:
            self._on_abort_reply(delta)
        elif flight.runs_at(batch) and flight.is_prefilling:
            self._apply_prefill(flight, delta)
        elif flight.runs_at(batch):
            self._apply_delta(flight, delta)
        else:
            # The replica restarted and took up what it had left. It begins anew, and without
            # a seed its tokens differ: go on from the tokens that the client has.
            self.fleet.forget(flight.replica_id)
            flight.suspect()
            self.unassign(flight, "its replica restarted")

    def _on_abort_reply(self, delta: TokenDelta) -> None:
        """Handle a reply to an abort: only an abandoned request's end matters."""
        flight = self._leaving.get(delta.request_id)
        if flight is not None and delta.finish_reason:
            flight.on_abort_reply(delta)
            if flight.abort_future is not None or flight.has_all_records:
                del self._leaving[delta.request_id]

    def _apply_prefill(self, flight: InFlightRequest, delta: TokenDelta) -> None:
        """A prompt is computed, or its replica couldn't: another one answers it in either case."""
        if not delta.finish_reason:
            return
        if delta.stop_reason == ABORTED_BY_OPERATOR:
            for index in range(len(flight.finished)):
                self._apply_delta(flight, msgspec.structs.replace(delta, index=index, token_ids=[]))
            return
        replica = self.fleet.get(flight.replica_id)
        if replica is not None:
            replica.submitted -= 1
        flight.finish_prefill(delta)
        flight.unassign("its prompt is computed")
        self.watchman.replace(flight)

    def _apply_delta(self, flight: InFlightRequest, delta: TokenDelta) -> None:
        if not 0 <= delta.index < len(flight.finished):
            with bound_request(**flight.log_fields):
                logger.error("Output %d of %s does not exist.", delta.index, delta.request_id)
            return
        if delta.finish_reason == "error" or delta.error is not None:
            self._apply_error(flight, delta)
            return
        was_dropped = delta.finish_reason == "abort" and delta.stop_reason != ABORTED_BY_OPERATOR
        if was_dropped and not flight.finished[delta.index]:
            self.fleet.forget(flight.replica_id)
            self.unassign(flight, "its replica gave it up")
            return
        try:
            chunk = flight.accept(delta)
        except LostTokens:
            self.unassign(flight, "some of its output was lost")
            return
        if chunk is not None:
            if flight.stream:
                start = len(flight.tokens[delta.index]) - len(chunk.token_ids)
                self.journal.record_tokens(flight.stream, start, chunk)
            flight.mailbox.push(chunk)
        if flight.done and self._flights.pop(flight.engine_id, None) is not None:
            replica = self.fleet.get(flight.replica_id)
            if replica is not None:
                replica.submitted -= 1

    def _apply_error(self, flight: InFlightRequest, delta: TokenDelta) -> None:
        info = delta.error
        if info is not None and info.code == EngineUnavailable.code:
            self.fleet.forget(flight.replica_id)
            self.unassign(flight, f"its replica refused it: {info.message}")
            return
        error: QuireError = (
            RemoteError(info)
            if info is not None
            else EngineUnavailable("The engine failed without saying why.")
        )
        self.fail(flight, error)

    def fail(self, flight: InFlightRequest, error: QuireError) -> None:
        """End a flight with an error."""
        self._flights.pop(flight.engine_id, None)
        if flight.placed and len(flight.finished) > 1:
            self.abort(flight.engine_id, flight.replica_id)  # its other outputs
        flight.finished = [True] * len(flight.finished)
        flight.mailbox.fail(error)

    def unassign(self, flight: InFlightRequest, reason: str) -> None:
        """Take a flight away from its replica and look for another one."""
        self._drop_replica(flight, reason)
        self.watchman.replace(flight)

    def _drop_replica(self, flight: InFlightRequest, reason: str) -> None:
        with bound_request(**flight.log_fields):
            logger.info("Request %s moves on: %s.", flight.engine_id, reason)
        if flight.placed:
            self.abort(flight.engine_id, flight.replica_id)
        flight.unassign(reason)

    def abort_all(self, flight: InFlightRequest) -> None:
        """Nobody waits for it any more."""
        if self._flights.pop(flight.engine_id, None) is None or flight.done:
            return
        if flight.placed:
            self.abort(flight.engine_id, flight.replica_id)
            if not flight.ran:
                flight.last_heard_at = time.monotonic()
                flight.abort_future = asyncio.get_running_loop().create_future()
                self._leaving[flight.engine_id] = flight
            else:
                self._await_records(flight)
        flight.finished = [True] * len(flight.finished)

    def _await_records(self, flight: InFlightRequest) -> None:
        if not flight.has_all_records:
            flight.await_records()
            self._leaving[flight.engine_id] = flight

    def abort_output(self, flight: InFlightRequest, index: int, reason: str) -> None:
        """End one output of a flight early."""
        if flight.finished[index]:
            return
        flight.finished[index] = True
        if flight.placed:
            output_index = None if flight.done else index
            self.abort(flight.engine_id, flight.replica_id, output_index, reason)
        if flight.done:
            self._flights.pop(flight.engine_id, None)
            if flight.placed:
                self._await_records(flight)

    def abort(
        self, engine_id: str, replica_id: str, index: int | None = None, reason: str = "abort"
    ) -> None:
        """Tell a replica to stop, without waiting for it."""
        self._inbox.abort(replica_id, engine_id, index, reason)

    def post(
        self, replica_id: str, message: ControlRequest, on_error: Callable[[RedisError], None]
    ) -> None:
        """Send an operator's word to a replica, soon."""
        self._inbox.post(replica_id, message, on_error)

    def expire_aborted(self, older_than_s: float) -> None:
        """Wait no more for engines that did not answer an abort."""
        limit = time.monotonic() - older_than_s
        for engine_id, flight in list(self._leaving.items()):
            if flight.last_heard_at < limit:
                del self._leaving[engine_id]
                flight.on_abort_reply(None)

    @property
    def flights(self) -> list[InFlightRequest]:
        """The open ones."""
        return list(self._flights.values())

    def is_idle(self) -> bool:
        """Whether no request is open."""
        return not self._flights

    @property
    def redis(self) -> Redis:
        """The client for short commands on the gateway's own keys."""
        return self._redis

    def waited(self, flight: InFlightRequest) -> float:
        """Seconds that a flight has been without a replica."""
        return time.monotonic() - flight.waiting_since


def _goes_on(delta: TokenDelta) -> bool:
    return delta.start > 0


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, EngineClient] = WeakKeyDictionary()


def get_engine_client() -> EngineClient:
    """The client of this loop, made at the first call. `await client.start()` before use."""
    loop = asyncio.get_running_loop()
    client = _clients.get(loop)
    if client is None:
        client = _clients[loop] = EngineClient()
    return client


async def close_engine_client() -> None:
    """Close this loop's client, if it has one."""
    client = _clients.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.close()
