"""`Compiler`: tries each grammar in a killable process, then builds what passed in the engine."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import numpy as np

from engine.contract.errors import EngineFault
from engine.structured.backend import BadGrammar, Vocabulary, build, load_tokenizer
from engine.structured.grammar import CompiledGrammar
from engine.structured.jobs import Job, JobLine, Outcome
from engine.structured.process import COMMAND, CompileProcess, Limits, WorkerFailed
from engine.structured.source import GrammarSpec

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger(__name__)

NUM_WORKERS = 2


class Compiler:
    """A few threads, each with a worker process of its own; they start at the first grammar.

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
    ) -> None:
        self.vocabulary = vocabulary
        self.line = JobLine(num_workers)
        self.processes = [
            CompileProcess(vocabulary, limits or Limits(), command) for _ in range(num_workers)
        ]
        self._threads: list[threading.Thread] = []
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()

    def submit(self, spec: GrammarSpec, tenant: str) -> Job:
        """Queue a grammar. Raises `EngineOverloaded` when the tenant has too many waiting."""
        job = self.line.put(spec, tenant)
        if not self._threads:
            self._threads = [
                threading.Thread(
                    target=self._work, args=(process,), name=f"grammar-{index}", daemon=True
                )
                for index, process in enumerate(self.processes)
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

    def _work(self, process: CompileProcess) -> None:
        """A thread's life: one job after the other until the line closes."""
        while (job := self.line.take()) is not None:
            self.line.finish(job, self._outcome(process, job))
        process.reap()

    def _outcome(self, process: CompileProcess, job: Job) -> Outcome:
        try:
            grammar, num_bytes = process.compile(job.spec.data)
            row = np.zeros(self.vocabulary.num_words, dtype=np.int32)
            matcher = build(self._own_tokenizer(), grammar, row)
        except BadGrammar as error:
            return str(error)
        except Exception as error:
            # Whatever it was, the request gets an answer and the thread lives on.
            if not isinstance(error, WorkerFailed):
                log.exception("A grammar couldn't be compiled")
            return EngineFault(f"The grammar couldn't be compiled: {error}")
        return CompiledGrammar(matcher, num_bytes + len(grammar))

    def _own_tokenizer(self) -> LLTokenizer:
        """The backend's tokenizer in this process, made once."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(self.vocabulary)
            return self._tokenizer
