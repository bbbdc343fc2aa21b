"""Fair shares between tenants: virtual token counters.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, arXiv 2401.00588). Each tenant
has a counter of the service that it got: its prompt tokens when a request starts, its output tokens
as they come, weighted by cost and divided by the tenant's weight. The waiting tenant with the
smallest counter goes first. No tenant can gain by sending more, an idle engine serves whoever is
there (work-conserving), and a tenant that comes back can't have saved up service: its counter is
lifted to the smallest one among those that wait.

For two tenants of equal weight that both have requests waiting all the time, the service that they
got differs by at most 2 * max(PROMPT_COST * longest prompt, OUTPUT_COST * tokens in the KV pool).
"""

from __future__ import annotations

from collections import deque

from engine.scheduler.queue import WaitingQueue
from engine.scheduler.sequence import Sequence, Status

#: Cost of a prompt token and of an output token; the paper's, after what providers charge.
PROMPT_COST = 1.0
OUTPUT_COST = 2.0


class _Level:
    """The waiting sequences of one priority, by tenant."""

    def __init__(self) -> None:
        self.tenants: dict[str, deque[Sequence]] = {}


class FairQueue(WaitingQueue):
    """Smaller `priority` first; within a priority, tenants by their counters; within a tenant FCFS.

    With one tenant this is FCFS.
    """

    def __init__(self) -> None:
        super().__init__()
        self._levels: dict[int, _Level] = {}
        #: Tenant -> service so far over weight, in weighted tokens.
        self.counters: dict[str, float] = {}
        #: The counter of whoever was served last: where a tenant starts when nobody waits.
        self._last_served = 0.0
        self._chosen: tuple[int, str] | None = None

    # -- service ------------------------------------------------------------------------------

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence starts and will compute `num_tokens` of its prompt."""
        self._charge(sequence, PROMPT_COST * num_tokens)

    def charge_output(self, sequence: Sequence) -> None:
        """A sequence got one output token."""
        self._charge(sequence, OUTPUT_COST)

    def _charge(self, sequence: Sequence, cost: float) -> None:
        message = sequence.request.message
        tenant = message.tenant
        self.counters[tenant] = self.counters.get(tenant, 0.0) + cost / message.weight
        self._chosen = None

    # -- the queue ----------------------------------------------------------------------------

    def _push(self, sequence: Sequence) -> None:
        self._line_of(sequence).append(sequence)

    def _push_back(self, sequence: Sequence) -> None:
        self._line_of(sequence).appendleft(sequence)

    def _line_of(self, sequence: Sequence) -> deque[Sequence]:
        """The tenant's line, made when it has none; a tenant that begins to wait is lifted."""
        message = sequence.request.message
        level = self._levels.setdefault(message.priority, _Level())
        line = level.tenants.get(message.tenant)
        if line is None:
            self._lift(message.tenant)
            line = level.tenants[message.tenant] = deque()
        self._chosen = None
        return line

    def _lift(self, tenant: str) -> None:
        """No service is saved up while a tenant has nothing to run."""
        waiting = {name for level in self._levels.values() for name in level.tenants}
        counter = self.counters.get(tenant, 0.0)
        if tenant in waiting:
            return
        floor = min((self.counters.get(name, 0.0) for name in waiting), default=self._last_served)
        self.counters[tenant] = max(counter, floor)

    def _head(self) -> Sequence | None:
        if self._chosen is None:
            self._chosen = self._choose()
        if self._chosen is None:
            return None
        priority, tenant = self._chosen
        return self._levels[priority].tenants[tenant][0]

    def _choose(self) -> tuple[int, str] | None:
        """The most urgent level's tenant with the smallest counter; ties by who came first."""
        while self._levels:
            priority = min(self._levels)
            self._drop_finished(priority)
            if not self._levels[priority].tenants:
                del self._levels[priority]
                continue
            tenants = self._levels[priority].tenants
            best = min(
                tenants, key=lambda name: (self.counters.get(name, 0.0), tenants[name][0].seq_id)
            )
            return priority, best
        return None

    def _drop_finished(self, priority: int) -> None:
        """Forget lines whose sequences have all ended while they waited."""
        tenants = self._levels[priority].tenants
        for name in list(tenants):
            line = tenants[name]
            while line and line[0].status is Status.FINISHED:
                line.popleft()
            if not line:
                del tenants[name]

    def _drop_head(self) -> None:
        if self._chosen is None:
            raise IndexError("The waiting queue is empty.")
        priority, tenant = self._chosen
        line = self._levels[priority].tenants[tenant]
        line.popleft()
        self._last_served = self.counters.get(tenant, 0.0)
        if not line:
            del self._levels[priority].tenants[tenant]
        self._chosen = None
