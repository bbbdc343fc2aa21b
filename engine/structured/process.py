"""`CompileProcess`: one compile worker, with a deadline on everything that is asked of it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from engine.structured.backend import BadGrammar, Vocabulary, short
from engine.structured.frames import read_frame, write_frame

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "engine.structured.worker")
START_TIMEOUT_S = 60.0
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one compilation may take: wall-clock seconds, and bytes of memory."""

    time_s: float = 10.0
    memory_bytes: int = 512 * 2**20


class WorkerFailed(Exception):
    """The worker couldn't be started, or can't read this model's tokenizer."""


class CompileProcess:
    """A worker process, started at its first use and again after it was killed.

    Not thread-safe, except `close`, which may be called from any thread to end a wait.
    """

    def __init__(
        self, vocabulary: Vocabulary, limits: Limits, command: tuple[str, ...] = COMMAND
    ) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self.num_kills = 0

    def compile(self, spec: bytes, vocabulary: Vocabulary | None = None) -> tuple[str, int]:
        """The grammar of a spec and the bytes that it took in the worker.

        `vocabulary`: in the place of the one that it was for so far, with a new worker.

        Raises:
            BadGrammar: it is wrong, or it took too much and its worker was killed.
            WorkerFailed: no worker could be started.
        """
        if vocabulary is not None and vocabulary is not self._vocabulary:
            self._kill()
            self._vocabulary = vocabulary
        answer = self._ask(self._running(), spec, self._limits.time_s)
        if answer is None:
            raise BadGrammar(
                f"compiling it took more than {self._limits.time_s:g} s "
                f"or {self._limits.memory_bytes // 2**20} MiB"
            )
        if "error" in answer:
            raise BadGrammar(answer["error"])
        return answer["grammar"], answer["bytes"]

    def close(self) -> None:
        """End the worker, and with it a wait for it; it isn't started again."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()

    def reap(self) -> None:
        """Collect the worker after `close`, in the thread that used it."""
        self._kill()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise WorkerFailed("The engine is closing.")
        process = self._process
        if process is not None and process.poll() is None:
            return process
        self._kill()
        process = self._process = self._start()
        hello = {
            "tokenizer": self._vocabulary.tokenizer,
            "vocab_size": self._vocabulary.size,
            "eos_token_ids": self._vocabulary.eos_token_ids,
            "memory_bytes": self._limits.memory_bytes,
        }
        answer = self._ask(process, json.dumps(hello).encode(), START_TIMEOUT_S)
        if answer is None or "error" in answer:
            self._kill()
            raise WorkerFailed(short(answer["error"]) if answer else "The compile worker died.")
        return process

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        threads = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **threads, "PYTHONPATH": path},
                # A signal to the engine's terminal isn't for the worker.
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerFailed(f"The compile worker can't be started: {error}.") from error

    def _ask(
        self, process: subprocess.Popen[bytes], frame: bytes, timeout_s: float
    ) -> dict[str, Any] | None:
        """Its answer; None when it died or was killed at the deadline."""
        timer = threading.Timer(timeout_s, self._overdue, (process,))
        timer.daemon = True
        timer.start()
        try:
            write_frame(_pipe(process.stdin), frame)
            answer = read_frame(_pipe(process.stdout))
        except OSError as error:
            log.info("A compile worker is gone: %s", error)
            answer = None
        finally:
            timer.cancel()
        if answer is None:
            self._kill()
            return None
        found: dict[str, Any] = json.loads(answer)
        return found

    def _overdue(self, process: subprocess.Popen[bytes]) -> None:
        log.warning("A compile worker was killed at its time limit.")
        self.num_kills += 1
        process.kill()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError as error:  # unsent bytes to a dead worker
                    log.debug("Closing a worker's pipe: %s", error)


def _pipe(pipe: IO[bytes] | None) -> Any:
    if pipe is None:
        raise OSError("The worker has no pipes.")
    return pipe
