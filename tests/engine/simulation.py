"""The scheduler on a virtual clock: Poisson arrivals, and steps that cost what they hold."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from engine.scheduler import Sequence
from engine.scheduler.fair_queue import OUTPUT_COST, PROMPT_COST
from tests.engine.helpers import Driver

#: Seconds of a step: reading the weights, a prompt token, a decoded sequence.
STEP_S, PREFILL_S, DECODE_S = 0.010, 0.00003, 0.00002


@dataclass
class Tenant:
    """What a tenant sends, and what became of it.

    Attributes:
        rate: requests a second.
        until: when it stops sending, in seconds.
        ttft: seconds to the first token, request by request.
        service: weighted tokens that it got.
    """

    rate: float
    until: float
    weight: float = 1.0
    prompt: tuple[int, int] = (20, 120)
    output: tuple[int, int] = (10, 60)
    ttft: list[float] = field(default_factory=list)
    service: float = 0.0
    next_at: float = 0.0

    @property
    def p99(self) -> float:
        """The 99th percentile of `ttft`."""
        return sorted(self.ttft)[int(0.99 * len(self.ttft))]


class Simulation:
    """Runs a `Driver`. A seed gives the same arrivals for a tenant, whoever else is there."""

    def __init__(
        self, driver: Driver, tenants: dict[str, Tenant], speed: float = 1.0, seed: int = 1
    ) -> None:
        self.driver, self.tenants, self.speed = driver, tenants, speed
        self.now = 0.0
        self._rng = {name: random.Random(f"{seed} {name}") for name in tenants}
        self._live: dict[int, tuple[Sequence, str, float, int]] = {}
        for name, tenant in tenants.items():
            tenant.next_at = self._rng[name].expovariate(tenant.rate)

    def run_until(self, end: float) -> None:
        """Go on until the clock says `end`."""
        while self.now < end:
            self._arrive()
            if not self.driver.scheduler.has_work:
                self.now = min([end, *(tenant.next_at for tenant in self.tenants.values())])
                continue
            self._step()

    @property
    def backlog(self) -> dict[str, int]:
        """Requests that wait or run, by tenant."""
        counts = dict.fromkeys(self.tenants, 0)
        for _, name, _, _ in self._live.values():
            counts[name] += 1
        return counts

    def _arrive(self) -> None:
        for name, tenant in self.tenants.items():
            rng = self._rng[name]
            while tenant.next_at <= self.now:
                prompt = [rng.randrange(10_000) for _ in range(rng.randint(*tenant.prompt))]
                sequence = self.driver.add(prompt, tenant=name, weight=tenant.weight)
                output = rng.randint(*tenant.output)
                self._live[sequence.seq_id] = (sequence, name, tenant.next_at, output)
                wait = rng.expovariate(tenant.rate)
                tenant.next_at += wait if tenant.next_at + wait < tenant.until else 1e9

    def _step(self) -> None:
        plan = self.driver.step(check=False)
        decodes = sum(count == 1 for count in plan.num_scheduled)
        cost = STEP_S + PREFILL_S * (plan.num_tokens - decodes) + DECODE_S * decodes
        self.now += cost / self.speed
        for seq_id, count in zip(plan.seq_ids, plan.num_scheduled, strict=True):
            sequence, name, _, _ = self._live[seq_id]
            if sequence.num_computed_tokens <= sequence.num_prompt_tokens:
                tenant = self.tenants[name]
                tenant.service += PROMPT_COST * count / tenant.weight
        for sequence in self.driver.sampled:
            self._token(*self._live[sequence.seq_id])

    def _token(self, sequence: Sequence, name: str, arrived: float, output: int) -> None:
        tenant = self.tenants[name]
        tenant.service += OUTPUT_COST / tenant.weight
        if sequence.num_output_tokens == 1:
            tenant.ttft.append(self.now - arrived)
        if sequence.num_output_tokens >= output:
            self.driver.scheduler.finish(sequence, "length")
            del self._live[sequence.seq_id]
