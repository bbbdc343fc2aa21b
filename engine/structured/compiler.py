"""`Compiler`: tries each grammar in a killable process, then builds what passed in the engine."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from engine.contract.errors import EngineFault, QuireError
from engine.structured.backend import BadGrammar, Vocabulary, build, load_tokenizer
from engine.structured.grammar import CompiledGrammar
from engine.structured.jobs import Job, JobLine, Outcome
from engine.structured.process import COMMAND, CompileProcess, Limits, WorkerFailed
from engine.structured.source import GrammarSpec
from engine.structured.token_space import TokenSpace
from engine.structured.vocabularies import MODELS, MOST_KEPT, Vocabularies, VocabularySource

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger(__name__)

NUM_WORKERS = 2


class Compiler:
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
        self.line = JobLine(num_workers)
        self.processes = [
            CompileProcess(vocabulary, limits or Limits(), command) for _ in range(2 * num_workers)
        ]
        self._threads: list[threading.Thread] = []
        #: With the backend's tokenizers in this process, by vocabulary; used longest ago first.
        self._spaces: OrderedDict[bytes, tuple[LLTokenizer, TokenSpace]] = OrderedDict()
        self._spaces_lock = threading.Lock()

    def submit(self, spec: GrammarSpec, tenant: str, vocabulary: VocabularySource = MODELS) -> Job:
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

    def _work(self, models: CompileProcess, adapters: CompileProcess) -> None:
        """A thread's life: one job after the other until the line closes."""
        while (job := self.line.take()) is not None:
            process = adapters if job.vocabulary.key else models
            self.line.finish(job, self._outcome(process, job))
        models.reap()
        adapters.reap()

    def _outcome(self, process: CompileProcess, job: Job) -> Outcome:
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

    def _space_of(self, key: bytes, vocabulary: Vocabulary) -> tuple[LLTokenizer, TokenSpace]:
        """The backend's tokenizer of a vocabulary in this process and its ids, made once."""
        with self._spaces_lock:
            found = self._spaces.pop(key, None)
            if found is None:
                tokenizer = load_tokenizer(vocabulary)
                eos = vocabulary.eos_token_ids
                found = tokenizer, TokenSpace(vocabulary.num_words, eos, tokenizer)
            self._spaces[key] = found
            while len(self._spaces) > 1 + MOST_KEPT:
                del self._spaces[next(each for each in self._spaces if each)]
            return found

    def _vocabulary_of(self, source: VocabularySource) -> Vocabulary:
        if not source.key:
            return self.vocabulary
        if self._vocabularies is None:
            raise RuntimeError("Nothing was said of adapters' vocabularies.")
        return self._vocabularies.of(source)
