"""`FailoverMonitor`: watches replicas and Redis, and moves requests away from lost replicas.

A replica is lost to a request when its heartbeat has stopped, its incarnation has changed, it
reports "failed", or its engine loop has stalled. The request then goes to a ready replica as prompt
and tokens so far, at once or when one becomes ready within `failover_wait_s`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from engine.contract.errors import EngineFault, EngineUnavailable, ModelReplaced
from engine.contract.messages import HEARTBEAT_INTERVAL_S, ReplicaEvent
from engine.contract.redis_keys import base_request_id, prefilled_request_id
from engine.system.redis_client import error_code_of
from inference.engine_client.fleet import Replica, failover_candidates
from inference.engine_client.flight import InFlightRequest
from inference.loop.fair_dispatch import iterate_cooperatively

if TYPE_CHECKING:
    from inference.engine_client.client import EngineClient

logger = logging.getLogger(__name__)

KEEP_ALIVE_EVERY_S = 15.0
#: If a replica reports no running requests, and a request of ours has had no delta for so long, the
#: replica never received it (a trimmed or lost inbox).
SILENCE_TIMEOUT_S = 10.0
#: The same while it runs other requests but queues none: longer than any prefill takes.
UNHEARD_BUSY_S = 180.0
#: Seconds that a draining replica has for a first delta before the request moves elsewhere.
UNREAD_S = 2.0
#: A request that gets tokens from each attempt hardly causes its replicas' crashes: it may have so
#: many times `max_attempts`.
ATTEMPTS_WITH_TOKENS = 10
#: Factor of `failover_wait_s` for a request that had started, while a replica is loading.
LOADING_IS_WORTH = 4
#: Seconds after which an engine won't reply to an abort any more.
ABORT_REPLY_TIMEOUT_S = 10.0

_STOPPED, _RESTARTED = "its replica's heartbeat stopped", "its replica restarted"
_STANDS_STILL = "its replica makes no progress"


class FailoverMonitor:
    """The engine client's monitor. `tick` polls once; `run` polls forever."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._redis_run: str | None = None
        self._redis_down = False
        #: Error message with which Redis rejected the last poll; "" if it didn't.
        self._refusal = ""
        self._last_keep_alive = -KEEP_ALIVE_EVERY_S
        self._looking = asyncio.Lock()

    @property
    def redis_trouble(self) -> str:
        """Problem of Redis at the last poll; "" for none."""
        if self._refusal:
            return f"Redis refuses commands: {self._refusal}"
        return "Redis can't be reached." if self._redis_down else ""

    async def run(self) -> None:
        """Poll at every heartbeat interval."""
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            await self.tick()

    def mark_redis_suspect(self) -> None:
        """A connection was lost: at the next poll, check whether Redis was restarted."""
        self._redis_down = True

    async def on_replica_event(self, news: ReplicaEvent) -> None:
        """A replica became ready or died: requests move at once, not at the next poll."""
        if news.alive:
            await self.tick()
            return
        self._client.fleet.mark_dead(news.replica_id, news.incarnation)
        request_ids = _base_request_ids(news.held)
        lost = 0
        for flight in self._client.flights:
            if flight.incarnation == news.incarnation:
                lost += 1
                flight.blame(request_ids, news.incarnation)
                self._client.unassign(flight, "its replica died")
            elif news.incarnation in flight.unresolved_replicas:
                flight.blame(request_ids, news.incarnation)
        if lost:
            was_at = "" if request_ids is None else f" while it was at {len(request_ids)} requests"
            logger.warning(
                "moved %d requests from replica %s: it died%s", lost, news.replica_id, was_at
            )

    async def tick(self) -> None:
        """Read the heartbeats and move requests off lost replicas, unless Redis is unreachable."""
        async with self._looking:
            await self._tick()

    async def _tick(self) -> None:
        try:
            await self._check_replicas()
        except RedisError as error:
            if not self._redis_down:
                logger.error("Redis unavailable: %s", error)
            self._redis_down = True
            word = error_code_of(error)
            self._refusal = f"{word} {str(error).removeprefix(word).strip()}" if word else ""
            self._last_keep_alive = -KEEP_ALIVE_EVERY_S
        else:
            if self._redis_down:
                self._client.fleet.reset_timers()
            self._redis_down, self._refusal = False, ""
            await self.check()
        self._give_up_waiting()
        self._client.expire_aborted(ABORT_REPLY_TIMEOUT_S)

    async def _check_replicas(self) -> None:
        client = self._client
        if self._redis_down or self._redis_run is None:
            await self._check_redis_run()
        # If Redis can't be written, replicas can't report either, so their silence means nothing. A
        # Redis that is out of memory or can't write its files still answers reads.
        await client.outbox.write_probe()
        await client.fleet.refresh()
        num_open = Counter(flight.incarnation for flight in client.flights)
        for replica in client.fleet:
            replica.count_open(num_open[replica.heartbeat.incarnation])
        now = time.monotonic()
        if now - self._last_keep_alive >= KEEP_ALIVE_EVERY_S:
            await client.outbox.refresh_ttl()
            self._last_keep_alive = now

    async def _check_redis_run(self) -> None:
        """After an outage: another Redis process may have lost streams or rolled them back."""
        info = await self._client.redis.info("server")
        run = str(info["run_id"])
        if self._redis_run not in (None, run):
            logger.warning("Redis was restarted: open requests are sent again.")
            self._client.outbox.restart()
            self._client.fleet.clear()
            for flight in self._client.flights:
                if flight.placed:
                    flight.refund_attempt()
                    self._client.unassign(flight, "Redis was restarted")
        self._redis_run = run

    async def check(self) -> None:
        """Unassign flights whose replica is lost; assign those that wait."""
        lost: Counter[tuple[str, str]] = Counter()
        async for flight in iterate_cooperatively(self._client.flights):
            if flight.done:  # since the loop started
                continue
            self._clear_suspicion(flight)
            if flight.placed:
                replica = self._client.fleet.get(flight.replica_id)
                reason = _loss_reason(flight, replica)
                if reason == _STANDS_STILL and replica is not None:
                    flight.blame(
                        _base_request_ids(replica.heartbeat.held), replica.heartbeat.incarnation
                    )
                elif reason in (_STOPPED, _RESTARTED):
                    flight.suspect()
                if not reason and (reason := self._is_unread(flight)):
                    flight.refund_attempt()  # an operator is draining the replica
                if not reason and (reason := self._is_silent(flight)):
                    flight.suspect()
                if reason:
                    lost[flight.replica_id, reason] += 1
                    self._client.unassign(flight, reason)
            else:
                self.replace(flight)
        for (replica_id, reason), count in lost.items():
            logger.warning("moved %d requests from replica %s: %s", count, replica_id, reason)

    def _clear_suspicion(self, flight: InFlightRequest) -> None:
        """Refund attempts at replicas that fell silent but are heard again: they were only slow."""
        for replica in self._client.fleet if flight.unresolved_replicas else ():
            if replica.heartbeat.incarnation in flight.unresolved_replicas and not replica.silent:
                del flight.unresolved_replicas[replica.heartbeat.incarnation]
                flight.refund_attempt()

    def _is_silent(self, flight: InFlightRequest) -> str:
        """Reason to move a flight from a silent replica, if another one is available; else "".

        If the replica was only slow, some tokens are computed twice and none is lost.
        """
        replica = self._client.fleet.get(flight.replica_id)
        if replica is None or not replica.silent or replica.heartbeat.state != "ready":
            return ""
        candidates = failover_candidates(flight, self._client.fleet.of_model(flight.model))
        is_available = any(other.can_answer and not other.silent for other in candidates)
        return "its replica is silent" if is_available else ""

    def _is_unread(self, flight: InFlightRequest) -> str:
        """Reason to move a flight that a draining replica hasn't read, and won't read; else ""."""
        replica = self._client.fleet.get(flight.replica_id)
        if replica is None or replica.heartbeat.state != "draining" or flight.ran:
            return ""
        candidates = self._client.fleet.of_model(flight.model)
        waited = time.monotonic() - flight.last_heard_at > UNREAD_S
        return "its replica is draining" if waited and any(r.can_answer for r in candidates) else ""

    def replace(self, flight: InFlightRequest) -> None:
        """Assign a waiting flight to a replica, or fail it after too many attempts."""
        max_attempts = self._client.settings.max_attempts
        if (
            flight.attempts_without_output >= max_attempts
            or flight.charged_attempts >= max_attempts * ATTEMPTS_WITH_TOKENS
        ):
            times = flight.attempt
            error = EngineFault(f"{times} replicas ran this request and none finished it.")
            self._client.fail(flight, error)
            return
        self._client.try_assign(flight)

    def _give_up_waiting(self) -> None:
        limit = self._client.settings.failover_wait_s
        for flight in self._client.flights:
            if not flight.placed and self._queue_timeout(flight, limit):
                self._client.fail(flight, self._unavailable_reason(flight, limit))

    def _unavailable_reason(self, flight: InFlightRequest, limit: float) -> EngineUnavailable:
        fleet = self._client.fleet
        if any(replica.can_answer for replica in fleet.of_model(flight.model)):
            return ModelReplaced(
                f"The model '{flight.model}' has other weights now, and no replica that could "
                f"continue this answer came back. Waited {limit:g} s."
            )
        return EngineUnavailable(f"{fleet.unavailable_reason(flight.model)} Waited {limit:g} s.")

    def _queue_timeout(self, flight: InFlightRequest, limit: float) -> bool:
        """Whether it has waited too long. A flight that has started waits longer for a reload."""
        waited = self._client.waited(flight)
        patient = flight.ran and self._is_coming(flight.model)
        return waited > limit * (LOADING_IS_WORTH if patient else 1)

    def _is_coming(self, model: str) -> bool:
        """Whether a replica of a model that was served before is loading again."""
        is_registered = self._client.fleet.model(model) is not None
        replicas = self._client.fleet.of_model(model)
        return is_registered and any(replica.heartbeat.state == "loading" for replica in replicas)


def _base_request_ids(request_ids: list[str] | None) -> frozenset[str] | None:
    """Ids of a replica's requests without their attempt numbers, as gateways know them."""
    if request_ids is None:
        return None
    return frozenset(prefilled_request_id(base_request_id(name)) for name in request_ids)


def _loss_reason(flight: InFlightRequest, replica: Replica | None) -> str:
    """Why the flight's replica is lost to it, or ""."""
    if replica is None:
        return _STOPPED
    beat = replica.heartbeat
    if beat.incarnation != flight.incarnation:
        return _RESTARTED
    if beat.state == "sleeping" or beat.paused:
        return ""  # it continues the flight when it wakes up or is resumed
    if beat.state not in ("ready", "draining"):
        return f"its replica is {beat.state}"
    if replica.stalled:
        return _STANDS_STILL
    unheard = time.monotonic() - flight.last_heard_at
    if unheard > SILENCE_TIMEOUT_S and not beat.stats.num_requests_waiting:
        busy = beat.stats.num_requests_running > 0
        if unheard > (UNHEARD_BUSY_S if busy else SILENCE_TIMEOUT_S):
            return "its replica does not know it"
    return ""
