"""The scheduler on a virtual clock: Poisson arrivals, and steps that cost what they hold."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from engine.scheduler import Sequence
from engine.scheduler.fair_queue import OUTPUT_COST, PROMPT_COST
from tests.engine.helpers import Driver


@dataclass(frozen=True)
class Costs:
    """Seconds of a step: reading the weights, a prompt token, a decoded sequence."""

    step: float = 0.010
    prefill: float = 0.00003
    decode: float = 0.00002


@dataclass
class Tenant:
    """What a tenant sends, and what became of it.

    Attributes:
        rate: requests a second.
        until: when it stops sending, in seconds.
        ttft: seconds to the first token, request by request.
        steps: the same in steps, with the one that ran when the request came.
        at_once: requests that it keeps in the machine, beside those that come by `rate`.
        service: weighted tokens that it got.
    """

    rate: float
    until: float
    weight: float = 1.0
    prompt: tuple[int, int] = (20, 120)
    output: tuple[int, int] = (10, 60)
    at_once: int = 0
    ttft: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    service: float = 0.0
    next_at: float = 0.0

    @property
    def p99(self) -> float:
        """The 99th percentile of `ttft`."""
        return sorted(self.ttft)[int(0.99 * len(self.ttft))]


class Simulation:
    """Runs a `Driver`. A seed gives the same arrivals for a tenant, whoever else is there."""

    def __init__(
        self,
        driver: Driver,
        tenants: dict[str, Tenant],
        speed: float = 1.0,
        seed: int = 1,
        costs: Costs | None = None,
    ) -> None:
        self.driver, self.tenants, self.speed = driver, tenants, speed
        self.costs = costs or Costs()
        self.now = 0.0
        self.num_steps = 0
        self._began: dict[int, int] = {}
        self._computed: dict[int, int] = {}
        self._rng = {name: random.Random(f"{seed} {name}") for name in tenants}
        self._live: dict[int, tuple[Sequence, str, float, int]] = {}
        #: Requests that wait or run, by tenant.
        self.backlog = dict.fromkeys(tenants, 0)
        for name, tenant in tenants.items():
            tenant.next_at = self._rng[name].expovariate(tenant.rate) if tenant.rate else 1e9

    def run_until(self, end: float) -> None:
        """Go on until the clock says `end`."""
        while self.now < end:
            self._arrive()
            if not self.driver.scheduler.has_work:
                self.now = min([end, *(tenant.next_at for tenant in self.tenants.values())])
                continue
            self._step()

    def _arrive(self) -> None:
        for name, tenant in self.tenants.items():
            for _ in range(tenant.at_once - self.backlog[name]):
                self._send(name, self.now)
            while tenant.next_at <= self.now:
                self._send(name, tenant.next_at)
                wait = self._rng[name].expovariate(tenant.rate)
                tenant.next_at += wait if tenant.next_at + wait < tenant.until else 1e9

    def _send(self, name: str, timestamp: float) -> None:
        tenant, rng = self.tenants[name], self._rng[name]
        prompt = [0] * rng.randint(*tenant.prompt)  # nothing is cached: it may say anything
        sequence = self.driver.add(prompt, tenant=name, weight=tenant.weight)
        self._live[sequence.seq_id] = (sequence, name, timestamp, rng.randint(*tenant.output))
        self.backlog[name] += 1
        # A request that comes while a step runs waits for its end, too.
        self._began[sequence.seq_id] = self.num_steps - (timestamp < self.now)

    def _step(self) -> None:
        self.num_steps += 1
        plan = self.driver.step(check=False)
        decodes = sum(count == 1 for count in plan.num_scheduled)
        costs, prompts = self.costs, plan.num_tokens - decodes
        cost = costs.step + costs.prefill * prompts + costs.decode * decodes
        self.now += cost / self.speed
        for seq_id, count in zip(plan.seq_ids, plan.num_scheduled, strict=True):
            sequence, name, _, _ = self._live[seq_id]
            # What is computed again after a preemption is no service.
            new = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            new = min(count, new - self._computed.get(seq_id, 0))
            if new > 0:
                self._computed[seq_id] = self._computed.get(seq_id, 0) + new
                tenant = self.tenants[name]
                tenant.service += PROMPT_COST * new / tenant.weight
        for sequence in self.driver.sampled:
            self._token(*self._live[sequence.seq_id])

    def _token(self, sequence: Sequence, name: str, arrived: float, output: int) -> None:
        tenant = self.tenants[name]
        tenant.service += OUTPUT_COST / tenant.weight
        if sequence.num_output_tokens == 1:
            tenant.ttft.append(self.now - arrived)
            tenant.steps.append(self.num_steps - self._began.pop(sequence.seq_id))
        if sequence.num_output_tokens >= output:
            self.driver.scheduler.finish(sequence, "length")
            del self._live[sequence.seq_id], self._computed[sequence.seq_id]
            self.backlog[name] -= 1
