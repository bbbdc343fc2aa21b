"""Limit on requests that wait for a model, and the order in which tenants are refused.

Past the point where every seat is taken, more requests in the house make nobody's answer come
sooner, but cost gateways and Redis their time. So what comes then is told when to come back, by
the rate at which the replicas really end requests.
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

#: Requests of a model that may always wait; and with many that run, so many times these.
MIN_WAITING, WAITING_PER_RUNNING = 256, 4
#: What may wait of requests that are less urgent than usual, or more, as a part of the others.
LESS_URGENT, MORE_URGENT = 0.5, 2.0
#: Of what becomes free, the part for those who were told to come again; others come anew.
RETRY_SHARE = 0.5
#: For how long a tenant's are told to come one after the other: until what may wait has run so many
#: times.
QUEUE_ROUNDS = 4.0
#: A tenant within its share is let in beyond the bound, up to so many times of it.
FAIR_SHARE_HEADROOM = 2.0
_COUNT_EVERY_S = 0.25
_MAX_RETRY_S, _UNKNOWN_S = 60.0, 5.0
#: Prompt tokens of a request without generation (an embedding, a score) that are as much work as
#: one request that generates: about what a step computes, and generating takes many steps.
POOLED_TOKENS_PER_REQUEST = 2048


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a model's replicas.

    Attributes:
        running, waiting: requests.
        per_second: requests that end in a second; 0 while that isn't known.
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
        """Requests of usual urgency that may wait."""
        return max(MIN_WAITING, WAITING_PER_RUNNING * self.running)

    def seconds_until(self, waiting: float) -> float:
        """Seconds until only so many requests wait, at least one."""
        if not self.per_second:
            return _UNKNOWN_S
        return min(_MAX_RETRY_S, max(1.0, (self.waiting - waiting) / self.per_second))


#: Tenants' lines of those who were told to come again; more are looked through.
_MAX_RETRY_QUEUES = 1000
#: Where no more wait, the rate of late says nothing of what comes: hardly anything was asked.
_MIN_QUEUE_FOR_RATE = 16


def check_client_timeout(model: str, load: Load, seconds: float) -> None:
    """Raise `Overloaded` (503) when a request's turn would come after its client has left."""
    if not load.per_second or load.waiting <= max(_MIN_QUEUE_FOR_RATE, seconds * load.per_second):
        return
    error = Overloaded(
        f"{load.waiting} requests wait for '{model}', and this one's turn would not come within "
        f"{seconds:g} s. Try again later."
    )
    error.retry_after = load.seconds_until(seconds * load.per_second)
    raise error


def _work(request: EngineRequest) -> float:
    """A request's work, in requests that generate: at most 1."""
    if request.pooling is None:
        return 1.0
    return min(1.0, len(request.prompt_token_ids) / POOLED_TOKENS_PER_REQUEST)


class QueueLimit:
    """Lets requests of one gateway in, or not."""

    def __init__(self) -> None:
        self._counted_at = -math.inf
        self._open_work: dict[tuple[str, str], float] = {}
        #: By model: work of an open request of this gateway, in requests that generate. The last
        #: known one stays: replicas' heartbeats may be older than the end of what they count.
        self._mean_work: dict[str, float] = {}
        self._retry_slots: dict[tuple[str, str, bool], float] = {}

    def check(
        self, model: str, tenant: str, priority: int, load: Load, flights: Iterable[InFlightRequest]
    ) -> None:
        """Let a request in.

        Args:
            model, tenant, priority: the request's. Less urgent ones are refused first.
            load: of the model's replicas.
            flights: all requests that this gateway has open.

        Raises:
            EngineOverloaded (429): the tenant has its share in the queue, and others wait too.
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
        """In how many seconds this one shall come again: one after the other of a tenant's, at a
        part of its rate, and not all of them at once to be refused again. The line ends where so
        many have run as may wait, `QUEUE_ROUNDS` times: those who ask again and again put nobody
        off for
        longer.
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
        """Count again, but not for each of thousands that are refused in a second."""
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
