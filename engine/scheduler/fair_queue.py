"""Fair shares between tenants: virtual token counters.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, arXiv 2401.00588). Each tenant
has a counter of the service it received: prompt tokens as they are computed, output tokens as they
are generated, weighted by cost and divided by the tenant's weight. The tenant with the smallest
counter goes first, whether its prompt waits or has started. No tenant gains by sending more; an
idle engine serves any tenant (work-conserving, except for reserved seats); and a tenant can't save
up service while idle: when it returns, its counter is lifted to the smallest one of the waiting
tenants. If counters are equal, the tenant that was served longest ago goes first.

For two tenants of equal weight that always have requests waiting, the service they receive differs
by at most 2 * max(PROMPT_COST * longest prompt, OUTPUT_COST * tokens in the KV pool).

Within a tenant the earliest due date goes first, and short prompts are due soon. Shortest job first
gives the least mean wait (Smith, "Various Optimizers for Single-Stage Production", 1956), but
starves long prompts; a due date in proportion to the prompt's length doesn't.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.contract.engine_config import EngineConfig
from engine.lazy_heap import LazyHeap
from engine.scheduler.request import Sequence
from engine.scheduler.request_queue import FCFSQueue, PriorityQueue, RequestQueue, SortKey

#: Cost of a prompt token and of an output token; as in the paper, after providers' prices.
PROMPT_COST = 1.0
OUTPUT_COST = 2.0
#: A tenant without requests for so long (or up to twice as long) is forgotten and starts anew.
FORGET_AFTER_S = 3600.0


class FairQueue(RequestQueue):
    """Orders by smaller `priority`; within a priority, tenants by their counters; within a tenant,
    sequences by their due dates.
    """

    def __init__(
        self, overtaking: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            overtaking: a sequence is due once, since its arrival, this many tokens per token of its
                prompt have been served, as prompt or output; 0: first come, first served within a
                tenant.
            clock: seconds; only differences matter.
        """
        super().__init__()
        self._clock = clock
        #: Time of the last cleanup of idle tenants, and the counters as of then.
        self._swept_at = clock()
        self._counters_then: dict[str, float] = {}
        self._overtaking = overtaking
        #: Prompt tokens of all started prompts, and output tokens: the clock of due dates. With
        #: prompts alone it would hardly advance while they wait for the seats of sequences that
        #: decode.
        self._served_tokens = 0
        #: Tenant -> service so far over weight, in weighted tokens.
        self.counters: dict[str, float] = {}
        #: Tenant -> the due-date clock when it last got prompt tokens.
        self._served_at: dict[str, int] = {}
        #: Counter of the tenant that was served last: the initial value for tenants if none waits.
        self._last_served = 0.0
        #: Waiting tenants, by their counters as of some time ago; counters only grow.
        self._waiting = LazyHeap()

    # -- service ------------------------------------------------------------------------------

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        """Count tokens of a prompt that a step computes."""
        self._served_tokens += num_tokens
        self._charge(sequence, PROMPT_COST * num_tokens)
        tenant = sequence.request.message.tenant
        self._served_at[tenant] = self._served_tokens
        self._last_served = self.counters[tenant]

    def charge_output(self, sequence: Sequence, num_tokens: int = 1) -> None:
        """Count output tokens; several at a time where drafts were accepted."""
        self._served_tokens += num_tokens
        self._charge(sequence, OUTPUT_COST * num_tokens)

    def charge_rejected_drafts(self, sequence: Sequence, num_tokens: int) -> None:
        """Count rejected drafts: they cost as much work as prompt tokens."""
        self._charge(sequence, PROMPT_COST * num_tokens)

    def _charge(self, sequence: Sequence, cost: float) -> None:
        message = sequence.request.message
        tenant = message.tenant
        self.counters[tenant] = self.counters.get(tenant, 0.0) + cost / message.weight

    # -- the policy ---------------------------------------------------------------------------

    fair = True

    def next_partial_prefill(self, partial_prefills: list[Sequence]) -> int:
        """The most urgent prompt of the tenant with the smallest counter."""
        if len(partial_prefills) == 1:
            return 0
        return min(
            range(len(partial_prefills)), key=lambda index: self._rank(partial_prefills[index])
        )

    def precedes(self, head: Sequence, partial_prefill: Sequence) -> bool:
        """By urgency, then by counters; a tenant doesn't interrupt its own prompts."""
        return self._rank(head) < self._rank(partial_prefill)

    def _rank(self, sequence: Sequence) -> tuple[float, float, int]:
        request = sequence.request
        tenant = request.message.tenant
        served_at = self._served_at.get(tenant, 0)
        return request.priority, self.counters.get(tenant, 0.0), served_at

    def _sequence_key(self, sequence: Sequence, preempted: bool) -> SortKey:
        priority = sequence.request.priority
        if preempted:
            return (priority, 0, sequence.seq_id)
        due = self._served_tokens + int(self._overtaking * sequence.num_queued_tokens)
        return (priority, 1, due if self._overtaking else 0, self._pushed)

    def _tenant_key(self, tenant: str, key: SortKey) -> tuple[float, ...]:
        served_at = self._served_at.get(tenant, 0)
        return (key[0], self.counters.get(tenant, 0.0), served_at, *key[1:])

    def _on_tenant_active(self, tenant: str) -> None:
        """Lift the tenant's counter: no service is saved up while it has nothing to run."""
        if self._clock() - self._swept_at >= FORGET_AFTER_S:
            self._forget_idle()
        counter = max(self.counters.get(tenant, 0.0), self._floor())
        self.counters[tenant] = counter
        self._waiting.put(tenant, counter)

    def _forget_idle(self) -> None:
        """Drop the counters of tenants without requests that got nothing since the last cleanup."""
        then = self._counters_then
        for tenant, counter in list(self.counters.items()):
            if then.get(tenant) == counter and tenant not in self._queues:
                del self.counters[tenant]
                self._served_at.pop(tenant, None)
        self._counters_then = self.counters.copy()
        self._swept_at = self._clock()

    def _on_tenant_idle(self, tenant: str) -> None:
        self._waiting.discard(tenant)

    def _floor(self) -> float:
        """The smallest counter of the waiting tenants."""
        while (first := self._waiting.first()) is not None:
            tenant, listed = first
            counter = self.counters.get(tenant, 0.0)
            if counter == listed:
                return counter
            self._waiting.put(tenant, counter)
        return self._last_served


# -- The waiting queue of each `scheduling_policy`.


def make_request_queue(config: EngineConfig) -> RequestQueue:
    """Make a waiting queue; the configuration has validated the policy's name."""
    match config.scheduling_policy:
        case "fair":
            return FairQueue(config.prompt_overtaking)
        case "priority":
            return PriorityQueue()
        case _:
            return FCFSQueue()
