"""`CompilePool`: compiles each grammar in a killable process first, then in the engine."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.contract.errors import EngineFault, EngineOverloaded, QuireError
from engine.structured_output.backend_llguidance import (
    BadGrammar,
    Vocabulary,
    build,
    load_tokenizer,
    short,
)
from engine.structured_output.grammar import CompiledGrammar, GrammarVocabulary
from engine.structured_output.grammar_spec import GrammarSpec
from engine.structured_output.vocabulary import (
    BASE_MODEL,
    MAX_CACHED,
    TokenizerSource,
    Vocabularies,
)
from engine.system.worker_process import WorkerProcess

if TYPE_CHECKING:
    from llguidance import LLTokenizer


#: Result of a compilation: the grammar, why it is invalid, or an unrelated failure.
CompileResult = CompiledGrammar | str | QuireError
#: Maximum number of waiting grammars per tenant; more are refused with 429.
MAX_PENDING_PER_TENANT = 256


@dataclass(slots=True, eq=False)
class CompileJob:
    """A grammar being compiled, for any number of requests.

    Attributes:
        vocabulary: the vocabulary it is compiled for.
        outcome: None while it waits or runs; then the grammar, or the error.
        charged_to: the tenant whose worker time it uses, once it has started.
        num_waiters: number of requests that wait for it; at 0 it is dropped unless it has started.
    """

    spec: GrammarSpec
    vocabulary: TokenizerSource = BASE_MODEL
    outcome: CompileResult | None = None
    charged_to: str | None = None
    num_waiters: int = 0
    tenants: set[str] = field(default_factory=set)

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Key that identical jobs share."""
        return self.vocabulary.key, self.spec.key


class CompileQueue:
    """Jobs by tenant. A thread takes the next job of the tenant with the fewest running ones.

    With several workers one tenant may occupy all but one of them, so that a tenant whose grammars
    all reach their limits never delays others for longer than one compilation.
    """

    def __init__(self, num_workers: int) -> None:
        self._per_tenant = max(1, num_workers - 1)
        self._lines: OrderedDict[str, deque[CompileJob]] = OrderedDict()
        self._running: dict[str, int] = {}
        self._jobs: dict[tuple[bytes, bytes], CompileJob] = {}
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._jobs)

    def put(
        self, spec: GrammarSpec, tenant: str, vocabulary: TokenizerSource = BASE_MODEL
    ) -> CompileJob:
        """Queue a grammar, or join the requests that wait for the same one.

        Raises:
            EngineOverloaded: too many grammars of the tenant are waiting.
        """
        with self._changed:
            job = self._jobs.get((vocabulary.key, spec.key))
            line = self._lines.get(tenant, ())
            if job is None or (tenant not in job.tenants and job.charged_to is None):
                if len(line) >= MAX_PENDING_PER_TENANT:
                    raise EngineOverloaded(
                        f"{len(line)} grammars wait already.", param="structured_outputs"
                    )
                job = job or CompileJob(spec, vocabulary)
                self._jobs[job.key] = job
                job.tenants.add(tenant)
                self._lines.setdefault(tenant, deque()).append(job)
                self._changed.notify_all()
            job.num_waiters += 1
            return job

    def leave(self, job: CompileJob) -> None:
        """Cancel a request's wait for its grammar."""
        with self._changed:
            job.num_waiters -= 1
            if job.num_waiters or job.charged_to is not None or job.outcome is not None:
                return
            self._jobs.pop(job.key, None)
            for tenant in job.tenants:
                self._drop(tenant, job)

    def pop(self) -> CompileJob | None:
        """Wait for the next job; None once the queue is closed."""
        with self._changed:
            while not self._closed:
                job = self._next()
                if job is not None:
                    return job
                self._changed.wait()
            return None

    def finish(self, job: CompileJob, outcome: CompileResult) -> None:
        """Set the outcome of a job that was popped."""
        with self._changed:
            tenant = job.charged_to or ""
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
            self._jobs.pop(job.key, None)
            job.outcome = outcome
            self._changed.notify_all()

    def wait(self, jobs: list[CompileJob], timeout_s: float) -> None:
        """Return once one of the jobs has an outcome, or after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: any(job.outcome is not None for job in jobs), timeout_s)

    def close(self) -> None:
        """Wake all callers of `pop`; no more jobs are handed out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self) -> CompileJob | None:
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

    def _drop(self, tenant: str, job: CompileJob) -> None:
        line = self._lines[tenant]
        line.remove(job)
        if not line:
            del self._lines[tenant]


log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "engine.structured_output.compile_worker")
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one compilation: wall-clock seconds, and bytes of memory."""

    time_s: float = 10.0
    memory_bytes: int = 512 * 2**20


class WorkerFailed(Exception):
    """The worker couldn't be started, or can't read this model's tokenizer."""


class CompileWorker:
    """A worker process, started at its first use and again after it was killed.

    Not thread-safe, except `close`, which any thread may call to end a wait.
    """

    def __init__(
        self, vocabulary: Vocabulary, limits: Limits, command: tuple[str, ...] = COMMAND
    ) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._command = command
        self._process: WorkerProcess | None = None
        self._closed = False
        self.num_kills = 0

    def compile(self, spec: bytes, vocabulary: Vocabulary | None = None) -> tuple[str, int]:
        """Return the grammar of a spec, and the bytes that it took in the worker.

        `vocabulary`: replaces the worker's previous one, with a new worker.

        Raises:
            BadGrammar: it is invalid, or it exceeded its limits and its worker was killed.
            WorkerFailed: no worker could be started.
        """
        if vocabulary is not None and vocabulary is not self._vocabulary:
            self.reap()
            self._vocabulary = vocabulary
        process = self._running()
        answer = process.request(spec, self._limits.time_s)
        self.num_kills += process.timed_out
        if answer is None:
            raise BadGrammar(
                f"compiling it took more than {self._limits.time_s:g} s "
                f"or {self._limits.memory_bytes // 2**20} MiB"
            )
        reply = json.loads(answer)
        if "error" in reply:
            raise BadGrammar(reply["error"])
        return reply["grammar"], reply["bytes"]

    def close(self) -> None:
        """Stop the worker, and with it any wait for it; it isn't started again."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()

    def reap(self) -> None:
        """Collect the worker, in the thread that used it."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _running(self) -> WorkerProcess:
        if self._closed:
            raise WorkerFailed("The engine is closing.")
        if self._process is not None and self._process.alive:
            return self._process
        self.reap()
        try:
            process = self._process = WorkerProcess(self._command, "compile worker")
        except OSError as error:
            raise WorkerFailed(f"The compile worker can't be started: {error}.") from error
        hello = {
            "tokenizer": self._vocabulary.tokenizer,
            "vocab_size": self._vocabulary.size,
            "eos_token_ids": self._vocabulary.eos_token_ids,
            "memory_bytes": self._limits.memory_bytes,
        }
        answer = process.request(json.dumps(hello).encode(), START_TIMEOUT_S)
        problem = "The compile worker died." if answer is None else json.loads(answer).get("error")
        if problem:
            self.reap()
            raise WorkerFailed(short(problem))
        return process


NUM_WORKERS = 2


class CompilePool:
    """A few threads, each with a worker process of its own for the model's vocabulary, and one for
    those of adapters, one after the other; they start at the first grammar.

    A grammar reaches the engine's memory only after it was built within its limits elsewhere.
    Building it here happens in the same thread and lets go of the interpreter's lock, so the
    engine's loop goes on.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        limits: Limits | None = None,
        num_workers: int = NUM_WORKERS,
        command: tuple[str, ...] = COMMAND,
        vocabularies: Vocabularies | None = None,
    ) -> None:
        """`vocabulary`: the model's; `vocabularies`: adapters' too, where there may be any."""
        self.vocabulary, self._vocabularies = vocabulary, vocabularies
        self.line = CompileQueue(num_workers)
        self.processes = [
            CompileWorker(vocabulary, limits or Limits(), command) for _ in range(2 * num_workers)
        ]
        self._threads: list[threading.Thread] = []
        #: With the backend's tokenizers in this process, by vocabulary; used longest ago first.
        self._spaces: OrderedDict[bytes, tuple[LLTokenizer, GrammarVocabulary]] = OrderedDict()
        self._spaces_lock = threading.Lock()

    def submit(
        self, spec: GrammarSpec, tenant: str, vocabulary: TokenizerSource = BASE_MODEL
    ) -> CompileJob:
        """Queue a grammar. Raises `EngineOverloaded` when the tenant has too many waiting."""
        job = self.line.put(spec, tenant, vocabulary)
        if not self._threads:
            pairs = zip(self.processes[::2], self.processes[1::2], strict=True)
            self._threads = [
                threading.Thread(target=self._work, args=pair, name=f"grammar-{index}", daemon=True)
                for index, pair in enumerate(pairs)
            ]
            for thread in self._threads:
                thread.start()
        return job

    def close(self) -> None:
        """End the threads and their processes."""
        self.line.close()
        for process in self.processes:
            process.close()
        for thread in self._threads:
            thread.join()

    def _work(self, models: CompileWorker, adapters: CompileWorker) -> None:
        """A thread's life: one job after the other until the line closes."""
        while (job := self.line.pop()) is not None:
            process = adapters if job.vocabulary.key else models
            self.line.finish(job, self._outcome(process, job))
        models.reap()
        adapters.reap()

    def _outcome(self, process: CompileWorker, job: CompileJob) -> CompileResult:
        try:
            vocabulary = self._vocabulary_of(job.vocabulary)
            grammar, num_bytes = process.compile(job.spec.data, vocabulary)
            tokenizer, space = self._space_of(job.vocabulary.key, vocabulary)
            matcher = build(tokenizer, grammar)
        except BadGrammar as error:
            return str(error)
        except QuireError as error:  # of the adapter's files
            return error
        except Exception as error:
            # Whatever it was, the request gets an answer and the thread lives on.
            if not isinstance(error, WorkerFailed):
                log.exception("A grammar couldn't be compiled")
            return EngineFault(f"The grammar couldn't be compiled: {error}")
        return CompiledGrammar(matcher, num_bytes + len(grammar), space)

    def _space_of(
        self, key: bytes, vocabulary: Vocabulary
    ) -> tuple[LLTokenizer, GrammarVocabulary]:
        """The backend's tokenizer of a vocabulary in this process and its ids, made once."""
        with self._spaces_lock:
            space = self._spaces.pop(key, None)
            if space is None:
                tokenizer = load_tokenizer(vocabulary)
                eos = vocabulary.eos_token_ids
                space = tokenizer, GrammarVocabulary(vocabulary.num_words, eos, tokenizer)
            self._spaces[key] = space
            while len(self._spaces) > 1 + MAX_CACHED:
                del self._spaces[next(cached_key for cached_key in self._spaces if cached_key)]
            return space

    def _vocabulary_of(self, source: TokenizerSource) -> Vocabulary:
        if not source.key:
            return self.vocabulary
        if self._vocabularies is None:
            raise RuntimeError("Nothing was said of adapters' vocabularies.")
        return self._vocabularies.get(source)
