"""The line of grammars to compile: fair between tenants, bounded for each."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from engine.contract.errors import EngineOverloaded, QuireError
from engine.structured.grammar import CompiledGrammar
from engine.structured.source import GrammarSpec
from engine.structured.vocabularies import MODELS, VocabularySource

#: What becomes of a grammar: itself, why it's bad, or a failure that is none of its own.
Outcome = CompiledGrammar | str | QuireError
#: Grammars of one tenant that wait; more are refused with 429.
MAX_PENDING_PER_TENANT = 256


@dataclass(slots=True, eq=False)
class Job:
    """One grammar being compiled, for however many requests.

    Attributes:
        vocabulary: whose tokens it is for.
        outcome: None while it waits or runs; then the grammar, or why there is none.
        charged_to: the tenant whose worker time it takes, once it has started.
        num_waiters: requests that want it; at 0 it is dropped unless it has started.
    """

    spec: GrammarSpec
    vocabulary: VocabularySource = MODELS
    outcome: Outcome | None = None
    charged_to: str | None = None
    num_waiters: int = 0
    tenants: set[str] = field(default_factory=set)

    @property
    def key(self) -> tuple[bytes, bytes]:
        """What it shares with jobs that are the same."""
        return self.vocabulary.key, self.spec.key


class JobLine:
    """Jobs by tenant. A thread takes the next job of the tenant with the fewest running ones.

    With several workers one tenant may hold all but one of them, so that a tenant whose grammars
    all run into their limits never keeps the others waiting for longer than one compilation.
    """

    def __init__(self, num_workers: int) -> None:
        self._per_tenant = max(1, num_workers - 1)
        self._lines: OrderedDict[str, deque[Job]] = OrderedDict()
        self._running: dict[str, int] = {}
        self._jobs: dict[tuple[bytes, bytes], Job] = {}
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._jobs)

    def put(self, spec: GrammarSpec, tenant: str, vocabulary: VocabularySource = MODELS) -> Job:
        """Queue a grammar, or join those who wait for the same one already.

        Raises:
            EngineOverloaded: the tenant has too many waiting.
        """
        with self._changed:
            job = self._jobs.get((vocabulary.key, spec.key))
            line = self._lines.get(tenant, ())
            if job is None or (tenant not in job.tenants and job.charged_to is None):
                if len(line) >= MAX_PENDING_PER_TENANT:
                    raise EngineOverloaded(
                        f"{len(line)} grammars wait already.", param="structured_outputs"
                    )
                job = job or Job(spec, vocabulary)
                self._jobs[job.key] = job
                job.tenants.add(tenant)
                self._lines.setdefault(tenant, deque()).append(job)
                self._changed.notify_all()
            job.num_waiters += 1
            return job

    def leave(self, job: Job) -> None:
        """A request no longer wants its grammar."""
        with self._changed:
            job.num_waiters -= 1
            if job.num_waiters or job.charged_to is not None or job.outcome is not None:
                return
            self._jobs.pop(job.key, None)
            for tenant in job.tenants:
                self._drop(tenant, job)

    def take(self) -> Job | None:
        """Wait for the next job; None when the line was closed."""
        with self._changed:
            while not self._closed:
                job = self._next()
                if job is not None:
                    return job
                self._changed.wait()
            return None

    def finish(self, job: Job, outcome: Outcome) -> None:
        """Say what came of a job that was taken."""
        with self._changed:
            tenant = job.charged_to or ""
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
            self._jobs.pop(job.key, None)
            job.outcome = outcome
            self._changed.notify_all()

    def wait(self, jobs: list[Job], timeout_s: float) -> None:
        """Return when one of the jobs has an outcome, or after the time."""
        with self._changed:
            self._changed.wait_for(lambda: any(job.outcome is not None for job in jobs), timeout_s)

    def close(self) -> None:
        """Wake all that wait in `take`; nothing more is handed out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self) -> Job | None:
        ready = [t for t in self._lines if self._running.get(t, 0) < self._per_tenant]
        if not ready:
            return None
        tenant = min(ready, key=lambda name: self._running.get(name, 0))
        job = self._lines[tenant][0]
        for name in job.tenants:
            self._drop(name, job)
        if tenant in self._lines:
            self._lines.move_to_end(tenant)
        job.charged_to = tenant
        self._running[tenant] = self._running.get(tenant, 0) + 1
        return job

    def _drop(self, tenant: str, job: Job) -> None:
        line = self._lines[tenant]
        line.remove(job)
        if not line:
            del self._lines[tenant]
