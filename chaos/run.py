"""The run: load of every kind, one fault after another, and the result of every request."""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chaos import faults, ledger
from chaos.answer import Answer
from chaos.client import Client, clients
from chaos.instance import Instance, StopFailed, holds, running, until
from chaos.kinds import KINDS, OTHER_ADAPTER, STREAM, UNDER_KILLS, Asked, asked_of, stopping
from chaos.ledger import Difference

#: Number of variants of each kind.
VARIANTS = 2
#: Kinds and numbers of the requests that one client repeats in turn.
Schedule = list[tuple[str, int]]
#: Maximum seconds for recovery from a fault, for earlier requests to end, for the ledger to agree.
RECOVERY_TIMEOUT_S, FINISH_TIMEOUT_S, SETTLEMENT_TIMEOUT_S = 120.0, 200.0, 60.0


@dataclass
class Request:
    """One request of the run. Times are `time.monotonic()`."""

    asked: Asked
    began: float
    finished_at: float = 0.0
    answer: Answer = field(default_factory=Answer)


@dataclass
class Window:
    """One fault: from its beginning until the instance has recovered.

    Attributes:
        running: sequences on the killed replica by its last heartbeat, at most half a second old.
        open: requests that clients waited for when it was killed.
    """

    fault: str
    began: float
    finished_at: float = 0.0
    running: int = 0
    open: int = 0


@dataclass
class Outcome:
    """The results of a run.

    Attributes:
        expected: responses without any fault. turned: the same with the weights that the adapter's
            alias is switched to.
    """

    requests: list[Request] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    expected: dict[tuple[str, int], Request] = field(default_factory=dict)
    turned: dict[tuple[str, int], Request] = field(default_factory=dict)
    difference: Difference = field(default_factory=Difference)
    skipped: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def changed(self, request: Request) -> str:
        """Describe how a response differs from that of the same weights without faults; or ""."""
        key = request.asked.kind, request.asked.number
        calm, other = self.expected[key], self.turned.get(key)
        if other is not None and other.answer.digests == request.answer.digests:
            calm = other
        return "" if request.answer.lost else calm.answer.differs(request.answer)

    def pause(self, request: Request) -> float:
        """Return the longest time without data; for unstreamed responses the excess over normal."""
        if request.asked.about.how == STREAM:
            return request.answer.longest
        calm = self.expected[request.asked.kind, request.asked.number]
        return max(0.0, request.answer.longest - calm.answer.longest)


class Run(ABC):
    """One run. Subclasses define the requests and what happens meanwhile.

    Args:
        note: receives log lines. log: where the instance's log is kept. postgresql: use it instead
            of SQLite. clock: make the clock of its processes adjustable.
        disaggregated: one replica computes prompts for the others. num_ranks: processes of each
            replica.
    """

    max_tokens: int

    def __init__(
        self, seed: int, log_line: Callable[[str], None], log: Path | None = None, *,
        postgresql: bool = False, clock: bool = False, disaggregated: bool = False,
        num_ranks: int = 1,
    ) -> None:  # fmt: skip
        self._log, self._seed, self._log_line = log, seed, log_line
        self._options: dict[str, Any] = {
            "postgresql": postgresql, "clock": clock, "disaggregated": disaggregated,
            "num_ranks": num_ranks,
        }  # fmt: skip
        self._outcome = Outcome()
        self._stopping = asyncio.Event()
        self._open: set[int] = set()

    @abstractmethod
    def _turns(self) -> list[Schedule]:
        """Return the schedules of the clients, which send requests until the faults are over."""

    @abstractmethod
    async def _harm(self, instance: Instance, client: Client) -> None:
        """Inject the faults."""

    async def run(self) -> Outcome:
        """Start an instance, inject faults, stop it. Raises `StartFailed`."""
        self._log_line("Starting an instance ...")
        try:
            async with (
                running(self._log, **self._options) as instance,
                clients(instance.url, instance.api_key) as client,
            ):
                await self.run_on(instance, client)
        except StopFailed as problem:
            self._problem(str(problem))
        return self._outcome

    async def run_on(self, instance: Instance, client: Client) -> Outcome:
        """Inject faults into a running instance."""
        await self._undisturbed(instance, client)
        previous_rows = await asyncio.to_thread(ledger.read, instance.database)
        load = [asyncio.create_task(self._load(client, turn)) for turn in self._turns()]
        try:
            await self._harm(instance, client)
            self._stopping.set()
            await asyncio.gather(*load)
        finally:  # after a failure or a cancellation no client waits for its response
            self._stopping.set()
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
        await self._compare(instance, set(previous_rows))
        return self._outcome

    async def _undisturbed(self, instance: Instance, client: Client) -> None:
        self._log_line("Asking everything once, undisturbed ...")

        async def one(turn: Schedule) -> None:
            for kind, number in turn:
                asked = asked_of(kind, number, instance.model, self.max_tokens)
                self._outcome.expected[kind, number] = await _calm(client, asked)
                if asked.about.adapter:
                    other = f"{instance.model}:{OTHER_ADAPTER}"
                    asked = replace(asked, body={**asked.body, "model": other})
                    self._outcome.turned[kind, number] = await _calm(client, asked)

        async with asyncio.TaskGroup() as group:
            for turn in self._turns():
                group.create_task(one(turn))
        await asyncio.sleep(3)  # until the last usage reaches the ledger

    async def _load(self, client: Client, turn: Schedule) -> None:
        """Send the requests of a schedule one after another, repeatedly."""
        for kind, number in itertools.cycle(turn):
            if self._stopping.is_set():
                return
            request = Request(self._outcome.expected[kind, number].asked, time.monotonic())
            self._open.add(id(request))
            try:
                await _fulfil(client, request)
            finally:
                self._open.discard(id(request))
                self._outcome.requests.append(request)
            if request.answer.lost:
                self._log_line(f"  lost: {kind}: {request.answer.lost}")
            elif differs := self._outcome.changed(request):
                self._log_line(f"  changed: {kind} {number}: {differs}")

    def _problem(self, text: str) -> None:
        self._outcome.problems.append(text)
        self._log_line(f"  {text}")

    async def _compare(self, instance: Instance, previous_ids: set[str]) -> None:
        """Wait until the ledger agrees; usage of dead processes is settled with a delay."""
        answers = [request.answer for request in self._outcome.requests]
        deadline = time.monotonic() + SETTLEMENT_TIMEOUT_S
        while True:
            rows = await asyncio.to_thread(ledger.read, instance.database)
            new = [row for name, row in rows.items() if name not in previous_ids]
            self._outcome.difference = ledger.compare(new, answers)
            if not self._outcome.difference.tokens or time.monotonic() > deadline:
                return
            await asyncio.sleep(1)


class Faults(Run):
    """Requests of every kind during faults of every kind, one after another."""

    max_tokens = 120

    def __init__(
        self, minutes: float, seed: int, log_line: Callable[[str], None], log: Path | None = None,
        names: Collection[str] = faults.FAULTS.keys(), *, postgresql: bool = False,
        disaggregated: bool = False, num_ranks: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(
            seed, log_line, log, postgresql=postgresql, clock=faults.CLOCK in names,
            disaggregated=disaggregated, num_ranks=num_ranks,
        )  # fmt: skip
        self._seconds, self._names = minutes * 60, set(names)

    def _turns(self) -> list[Schedule]:
        asked = [kind for kind in KINDS if kind not in UNDER_KILLS]
        return [[(kind, number) for number in range(VARIANTS)] for kind in asked]

    async def _harm(self, instance: Instance, client: Client) -> None:
        """Inject one fault after another until the time is over."""
        impossible = faults.impossible(instance)
        self._outcome.skipped = {name: impossible[name] for name in self._names & impossible.keys()}
        names = [name for name in faults.FAULTS if name in self._names - impossible.keys()]
        if not names:
            self._problem("none of the faults can be done here")
            return
        end = time.monotonic() + self._seconds
        for planned in faults.plan(self._seed, names):
            await asyncio.sleep(planned.after_s)
            if time.monotonic() > end:
                return
            window = Window(planned.name, time.monotonic())
            self._outcome.windows.append(window)
            try:
                await faults.FAULTS[planned.name](instance, planned.rng)
            except faults.FaultNotDetected as problem:
                self._problem(f"{planned.name}: {problem}")
            await until(instance.is_healthy, RECOVERY_TIMEOUT_S, planned.name, instance.log)
            try:
                async with asyncio.timeout(RECOVERY_TIMEOUT_S):
                    await client.healthy()
            except TimeoutError:
                self._problem(f"{planned.name}: not healthy {RECOVERY_TIMEOUT_S:.0f} s later")
            window.finished_at = time.monotonic()
            self._log_line(
                f"{planned.name}: whole again after {window.finished_at - window.began:.1f} s"
            )
            await self._await_finished(set(self._open), planned.name)

    async def _await_finished(self, requests: set[int], name: str) -> None:
        """Wait for requests that overlap with the fault, so that the next isn't blamed for them."""
        try:
            await holds(lambda: not self._open & requests, FINISH_TIMEOUT_S)
        except TimeoutError:
            self._problem(f"{name}: requests still ran {FINISH_TIMEOUT_S:.0f} s later")


async def _calm(client: Client, asked: Asked) -> Request:
    """Return the expected response, without faults. Raises RuntimeError if it isn't valid."""
    request = Request(asked, time.monotonic())
    await _fulfil(client, request)
    answer, about = request.answer, asked.about
    if answer.lost:
        raise RuntimeError(f"{asked.kind} without any fault: {answer.lost}")
    if not all(getattr(choice, about.has) for choice in answer.choices.values()):
        raise RuntimeError(f"{asked.kind} {asked.number} without any fault has no {about.has}.")
    if about.stops and "stop" not in asked.body:
        request = await _calm(client, stopping(asked, answer.choices[0].text))
        if request.answer.choices[0].finish_reason != "stop":
            raise RuntimeError(f"{asked.kind} {asked.number} didn't stop.")
    return request


async def _fulfil(client: Client, request: Request) -> None:
    request.answer = await client.ask(request.asked)
    request.finished_at = time.monotonic()
