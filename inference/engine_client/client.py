"""`EngineClient`: sends requests to replicas and returns their tokens, across failovers."""

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
    FollowPrefill,
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

#: Maximum number of a submission's requests that are placed in one iteration of the event loop.
MAX_PLACED_PER_TICK = 16
#: Maximum number of first tokens that are dispatched while their batch is being received.
MAX_STARTED_PER_TICK = 32
#: Seconds after a rejection during which another one is likely.
RECENT_REJECTION_S = 2.0
#: Leading bytes of prompt embeddings that are hashed for prefix affinity.
MAX_EMBEDS_BYTES = 16_384


class EngineClient:
    """Engine client of one event loop. All methods are called on that loop.

    Attributes:
        gateway_id: the name of this process, which its outbox is named after.
        fleet: the replicas, as of their latest heartbeats.
        settings: the settings that the client started with.
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
            self.journal.restore_marks,
        )
        self.flusher = Flusher(self._redis, prefix, f"gateway-{self.gateway_id[:12]}")
        self._news = ReplicaEventReader(self._redis, prefix, self.watchman.on_replica_event)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started: asyncio.Task[None] | None = None
        self._failing = self._closed = False

    async def start(self) -> None:
        """Start reading. Idempotent; waits for the first poll of the replicas."""
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
        """Abort open requests and stop reading."""
        if self._closed:
            return
        self._closed = True
        self.fail_all()
        for flight in list(self._flights.values()):
            self.abort_all(flight)
        self.expire_aborted(-1.0)
        await self._inbox.close()
        # Cancel repeatedly: Python 3.11's `wait_for`, below the Redis client, may swallow one.
        while pending := [task for task in self._tasks if not task.done()]:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=0.1)
        # Metrics are at most a second old, and the outbox expires by itself.
        with contextlib.suppress(RedisError):
            await flush(self._redis, self.settings.key_prefix)
            await self.journal.save()
            await self.outbox.delete()
        await self._reading.close()
        await self._link.close()
        await self._redis.aclose()

    def fail_all(self) -> None:
        """Fail open requests and all later submissions because the process is shutting down.

        The readers can then still report the error to their clients and abort their requests;
        cancelling their tasks would prevent both.
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
        """Submit requests that belong together; a chunk's `number` is its request's list index.

        Args:
            tenant: the tenant that the requests belong to.
            stream: the name under which tokens are journaled for other gateways; "" for none.
            resume_state: what another gateway received of them; only later tokens are returned.

        Never fails by itself: without a replica the submission waits, and then raises
        `EngineUnavailable` at its reader, or `GatewayShuttingDown` when the process shuts down.
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
            request.prefix_key = prefix_key(request.prompt_token_ids, scope)
            flight = InFlightRequest(request, number, submission.mailbox, model, stream=stream)
            if resume_state is not None:
                flight.resume_from(*resume_state.for_prompt(number))
            yield flight

    def _assign_next(self, submission: Submission, flights: Iterator[InFlightRequest]) -> None:
        """Place the next remaining request; other streams' tokens are handled in between."""
        if submission.closed or self._closed:
            return
        turn = list(islice(flights, MAX_PLACED_PER_TICK))
        submission.flights.extend(turn)
        unfinished = [flight for flight in turn if not flight.done]
        # If placing one fails, the failover monitor places the rest.
        self._flights.update((flight.engine_id, flight) for flight in unfinished)
        try:
            for flight in unfinished:
                self.try_assign(flight)
            self._link.flush()  # an iteration of the loop takes long while many requests start
        finally:
            if len(turn) == MAX_PLACED_PER_TICK:
                loop = asyncio.get_running_loop()
                loop.call_soon(self._assign_next, submission, flights)

    def check_queue(self, model: str, tenant: str, priority: int, *, timeout_s: float) -> None:
        """Raise what `QueueLimit` raises when too many requests wait for the model, or when a
        client that waits `timeout_s` seconds would not be served in time.
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
        """Whether `check_queue` rejected a request a moment ago."""
        return time.monotonic() - self._refused_at < RECENT_REJECTION_S

    def check_any_queue(self, models: Iterable[str], tenant: str, priority: int) -> None:
        """Raise the last model's `check_queue` error if all models are over their limits."""
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
        """Assign a waiting flight to a ready replica; return False if there is none."""
        slack = self.settings.affinity_slack
        of_model = self.fleet.of_model(flight.model)
        replicas = failover_candidates(flight, of_model)
        replica = choose_replica(
            replicas,
            flight.request.prefix_key,
            slack,
            flight.request.adapter_digest,
            self.settings.local_replica_id,
        )
        if replica is None:
            return False
        self._flights.pop(flight.engine_id, None)
        prefill = None
        if replica.heartbeat.kv_handover is not None:
            prefill = self._prefill_planner.choose(flight, replicas, replica, slack)
        peers = {peer.kv_address for peer in of_model}
        if prefill is not None:
            message = flight.assign_prefill(prefill.heartbeat, prefill.kv_address, peers)
            if prefill.kv_address:
                follow = FollowPrefill(
                    request=msgspec.structs.replace(message, kv_peer=flight.kv_peer, media_data={})
                )
                # One that is lost costs time alone: the blocks are read once all are computed.
                flight.reader_id = replica.heartbeat.replica_id
                self._inbox.post(flight.reader_id, follow, lambda _: None)
            replica = prefill
        else:
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
        except (OverflowError, TypeError, ValueError):  # msgspec can't encode the message
            # Every retry would fail too, so its reader must get the error now.
            with bound_request(**flight.log_fields):
                logger.exception("Request %s can't be written.", flight.engine_id)
            self.fail(flight, EngineFault("The request can't be sent to an engine."))
        return True

    def _on_send_failed(self, flight: InFlightRequest, attempt: int) -> None:
        """Redis did not accept the request. It is placed again after the next successful poll."""
        if flight.attempt == attempt and flight.placed and not flight.done:
            flight.refund_attempt()
            self._drop_replica(flight, "Redis did not take it")

    def _on_batch(self, batch: OutboxBatch) -> None:
        """Dispatch the first tokens of answers while a batch is being received: those clients have
        waited longest. `_dispatch_batch` handles the rest of the batch, and first tokens beyond
        `MAX_STARTED_PER_TICK`.
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
        # A step may have thousands of deltas.
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
            # The replica restarted and read its unfinished inbox again. It starts the request
            # over, and without a seed its tokens differ: continue from the client's tokens.
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
        """A prefill ended or failed: in either case another replica answers the request."""
        if not delta.finish_reason:
            return
        if delta.finish_reason in ("error", "abort") and flight.reader_id:
            self.abort(flight.engine_id, flight.reader_id)
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
        self._flights.pop(flight.engine_id, None)
        if flight.placed and len(flight.finished) > 1:
            self._abort_attempt(flight)  # its other outputs
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
            self._abort_attempt(flight)
        flight.unassign(reason)

    def abort_all(self, flight: InFlightRequest) -> None:
        """Abort all outputs of a flight that no reader waits for any more."""
        if self._flights.pop(flight.engine_id, None) is None or flight.done:
            return
        if flight.placed:
            self._abort_attempt(flight)
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

    def _abort_attempt(self, flight: InFlightRequest) -> None:
        """Tell a flight's replica to stop, and the one that reads what it computes."""
        for replica_id in filter(None, (flight.replica_id, flight.reader_id)):
            self.abort(flight.engine_id, replica_id)

    def abort(
        self, engine_id: str, replica_id: str, index: int | None = None, reason: str = "abort"
    ) -> None:
        """Tell a replica to stop, without waiting for it."""
        self._inbox.abort(replica_id, engine_id, index, reason)

    def post(
        self, replica_id: str, message: ControlRequest, on_error: Callable[[RedisError], None]
    ) -> None:
        """Send an operator's command to a replica, without waiting."""
        self._inbox.post(replica_id, message, on_error)

    def expire_aborted(self, older_than_s: float) -> None:
        """Stop waiting for engines that did not reply to an abort."""
        limit = time.monotonic() - older_than_s
        for engine_id, flight in list(self._leaving.items()):
            if flight.last_heard_at < limit:
                del self._leaving[engine_id]
                flight.on_abort_reply(None)

    @property
    def flights(self) -> list[InFlightRequest]:
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
    """The client of this loop, created at the first call. `await client.start()` before use."""
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
