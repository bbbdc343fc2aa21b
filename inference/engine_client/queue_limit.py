"""Limit on requests that wait for a model, and the order in which tenants are rejected.

Once the replicas run at capacity, queueing more requests gets no answer out sooner, but costs
gateways and Redis time. Requests beyond the limit are therefore rejected with a `Retry-After` that
is computed from the rate at which the replicas actually finish requests.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from engine.contract.errors import EngineOverloaded
from engine.contract.messages import EngineRequest
from inference.engine_client.fleet import Replica
from inference.engine_client.flight import InFlightRequest
from inference.errors import Overloaded

#: Requests of a model that may always wait; and the limit as a multiple of its running requests.
MIN_WAITING, WAITING_PER_RUNNING = 256, 4
#: Factors of the queue limit for requests of lower and of higher priority than the default.
LESS_URGENT, MORE_URGENT = 0.5, 2.0
#: Share of the freed capacity that is promised to retries; the rest is for new requests.
RETRY_SHARE = 0.5
#: Bound on how far ahead a tenant's retries are spread: so many times the time that a full queue
#: takes to run.
QUEUE_ROUNDS = 4.0
#: A tenant within its fair share is accepted beyond the limit, up to so many times the limit.
FAIR_SHARE_HEADROOM = 2.0
_COUNT_EVERY_S = 0.25
_MAX_RETRY_S, _UNKNOWN_S = 60.0, 5.0
#: Prompt tokens of a pooling request (an embedding, a score) that are as much work as one
#: generating request: about what one step computes, and generating takes many steps.
POOLED_TOKENS_PER_REQUEST = 2048


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a model's replicas.

    Attributes:
        running, waiting: number of requests.
        per_second: requests finished per second; 0 if unknown.
    """

    running: int = 0
    waiting: int = 0
    per_second: float = 0.0

    @classmethod
    def of(cls, replicas: Iterable[Replica]) -> Load:
        """Load of the replicas that are ready."""
        ready = [replica for replica in replicas if replica.ready]
        stats = [replica.heartbeat.stats for replica in ready]
        return cls(
            sum(item.num_requests_running for item in stats),
            sum(
                max(0, replica.heartbeat.stats.num_requests_waiting + replica.submitted)
                for replica in ready
            ),
            sum(replica.per_second for replica in ready),
        )

    @property
    def max_waiting(self) -> int:
        """Maximum number of waiting requests of default priority."""
        return max(MIN_WAITING, WAITING_PER_RUNNING * self.running)

    def seconds_until(self, waiting: float) -> float:
        """Seconds, at least 1, until no more than `waiting` requests wait."""
        if not self.per_second:
            return _UNKNOWN_S
        return min(_MAX_RETRY_S, max(1.0, (self.waiting - waiting) / self.per_second))


#: Number of tenants' retry queues above which expired ones are removed.
_MAX_RETRY_QUEUES = 1000
#: With a shorter queue the recent rate says nothing about capacity: there was hardly any demand.
_MIN_QUEUE_FOR_RATE = 16


def check_client_timeout(model: str, load: Load, seconds: float) -> None:
    """Raise `Overloaded` (503) if the client would time out before its request is served."""
    if not load.per_second or load.waiting <= max(_MIN_QUEUE_FOR_RATE, seconds * load.per_second):
        return
    error = Overloaded(
        f"{load.waiting} requests wait for '{model}', and this one's turn would not come within "
        f"{seconds:g} s. Try again later."
    )
    error.retry_after = load.seconds_until(seconds * load.per_second)
    raise error


def _work(request: EngineRequest) -> float:
    """Work of a request, in generating requests: at most 1."""
    if request.pooling is None:
        return 1.0
    return min(1.0, len(request.prompt_token_ids) / POOLED_TOKENS_PER_REQUEST)


class QueueLimit:
    """Accepts or rejects the requests of one gateway."""

    def __init__(self) -> None:
        self._counted_at = -math.inf
        self._open_work: dict[tuple[str, str], float] = {}
        #: By model: mean work of this gateway's open requests, in generating requests. The last
        #: known value stays: heartbeats may still count requests that have ended since.
        self._mean_work: dict[str, float] = {}
        self._retry_slots: dict[tuple[str, str, bool], float] = {}

    def check(
        self, model: str, tenant: str, priority: int, load: Load, flights: Iterable[InFlightRequest]
    ) -> None:
        """Raise if the request must be rejected.

        Args:
            model, tenant, priority: the request's. Less urgent ones are refused first.
            load: of the model's replicas.
            flights: all requests that this gateway has open.

        Raises:
            EngineOverloaded (429): the tenant has used its share of the queue, and others wait too.
            Overloaded (503): the queue is full.
        """
        max_waiting = float(load.max_waiting)
        if priority:
            max_waiting *= LESS_URGENT if priority > 0 else MORE_URGENT
        if load.waiting < max_waiting:
            return
        self._count(flights)
        waiting = load.waiting * self._mean_work.get(model, 1.0)
        if waiting < max_waiting:
            return
        tenants = {name for of, name in self._open_work if of == model} | {tenant}
        share = (load.running + max_waiting) / len(tenants)
        within = self._open_work.get((model, tenant), 0.0) < share
        if len(tenants) > 1 and within and waiting < FAIR_SHARE_HEADROOM * max_waiting:
            return
        kind = Overloaded if within or len(tenants) == 1 else EngineOverloaded
        error: Overloaded | EngineOverloaded = kind(
            f"{load.waiting} requests wait for '{model}' already. Try again later."
        )
        rate = load.per_second / len(tenants)
        error.retry_after = self._retry_after(
            (model, tenant, priority > 0), load, max_waiting, rate
        )
        raise error

    def _retry_after(
        self, whose: tuple[str, str, bool], load: Load, max_waiting: float, per_second: float
    ) -> float:
        """Seconds after which this request should be retried. A tenant's retries are spread at a
        part of its rate, so that they don't all return at once and are rejected again. The queue of
        retries ends `QUEUE_ROUNDS` full queues ahead, so that clients that retry too often delay
        nobody for longer.
        """
        first = load.seconds_until(max_waiting)
        if not per_second:
            return first
        now = time.monotonic()
        step = 1 / (RETRY_SHARE * per_second)
        wait = max(first, self._retry_slots.get(whose, now) - now + step)
        if wait > first + QUEUE_ROUNDS * max_waiting / load.per_second:
            wait = first
        if len(self._retry_slots) > _MAX_RETRY_QUEUES:
            self._retry_slots = {
                name: retry_at for name, retry_at in self._retry_slots.items() if retry_at > now
            }
        self._retry_slots[whose] = now + wait
        return min(_MAX_RETRY_S, wait)

    def _count(self, flights: Iterable[InFlightRequest]) -> None:
        """Count open work, at most every `_COUNT_EVERY_S`, however often requests are rejected."""
        now = time.monotonic()
        if now - self._counted_at >= _COUNT_EVERY_S:
            self._counted_at = now
            num_requests: Counter[str] = Counter()
            self._open_work = {}
            for flight in flights:
                num_requests[flight.model] += 1
                key = flight.model, flight.request.tenant
                self._open_work[key] = self._open_work.get(key, 0.0) + _work(flight.request)
            for model, count in num_requests.items():
                works = [work for (name, _), work in self._open_work.items() if name == model]
                self._mean_work[model] = sum(works) / count
