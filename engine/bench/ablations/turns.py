"""Two engines for each part, one with it and one without, that take turns."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from engine.bench.ablations.loads import LOADS, Sizes
from engine.bench.ablations.parts import Facts, Part
from engine.contract.errors import QuireError

ROOT = Path(__file__).parents[3]


class WorkerFailed(QuireError):
    """An engine of an ablation didn't start, or went away."""


class Worker:
    """A process with an engine; idle, it takes no CPU."""

    def __init__(
        self, config: Mapping[str, Any], sizes: Sizes, environment: Mapping[str, str] | None = None
    ) -> None:
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine.bench.ablations.worker"],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        try:
            told = {"config": dict(config), "sizes": dataclasses.asdict(sizes)}
            self.facts = Facts(**self._ask(json.dumps(told)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def figure(self, load: str, seed: int) -> float:
        """Do a load once."""
        return float(self._ask(f"{load} {seed}")["figure"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def _ask(self, line: str) -> dict[str, Any]:
        """The answer to a line. Raises `WorkerFailed` with what the process said last."""
        try:
            print(line, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()  # type: ignore[union-attr]
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise WorkerFailed(f"The engine ended: {self._last_words()}")
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise WorkerFailed(found["error"])
        return found

    def _last_words(self) -> str:
        self._process.wait()
        self._said.seek(0)
        lines = self._said.read().split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")


@dataclass(frozen=True, slots=True)
class Row:
    """What a part brought to a load.

    Attributes:
        with_, without: medians of the figures, in the load's unit.
        gains: of each turn, how many times as good the figure was with the part.
        skipped: why there are none.
    """

    part: str
    load: str = ""
    with_: float = 0.0
    without: float = 0.0
    gains: tuple[float, ...] = ()
    skipped: str = ""

    def figures(self, switch: str) -> dict[str, Any]:
        """As JSON."""
        row: dict[str, Any] = {"benchmark": "ablation", "part": self.part, "switch": switch}
        if self.skipped:
            return row | {"skipped": self.skipped}
        return row | {
            "load": self.load,
            "unit": LOADS[self.load].unit,
            "with": round(self.with_, 2),
            "without": round(self.without, 2),
            "gain": round(statistics.median(self.gains), 3),
            "gain_low": round(min(self.gains), 3),
            "gain_high": round(max(self.gains), 3),
            "turns": len(self.gains),
        }


def compare(
    parts: Mapping[str, Part],
    config: Mapping[str, Any],
    sizes: Sizes,
    turns: int,
    started: Callable[[Facts], None] = lambda facts: None,
) -> Iterator[Row]:
    """The rows of each part, as they are there; `started` is told what the engine says of itself.

    Raises `WorkerFailed` when the engine doesn't start as `config` says.
    """
    with Worker(config, sizes) as plain:
        started(plain.facts)
        for name, part in parts.items():
            if reason := part.refuses(plain.facts):
                yield Row(name, skipped=reason)
                continue
            try:
                yield from _compare(name, part, config, sizes, turns, plain)
            except WorkerFailed as error:
                yield Row(name, skipped=error.message)


def _compare(
    name: str,
    part: Part,
    config: Mapping[str, Any],
    sizes: Sizes,
    turns: int,
    plain: Worker,
) -> Iterator[Row]:
    own = Worker({**config, **part.with_}, sizes) if part.with_ else plain
    try:
        with Worker({**config, **part.without}, sizes, part.environment) as without:
            for load in part.loads:
                yield _row(name, load, own, without, turns)
    finally:
        if own is not plain:
            own.close()


def _row(name: str, load: str, with_: Worker, without: Worker, turns: int) -> Row:
    """Turns of both, after one each that doesn't count; who begins changes from turn to turn."""
    for worker in (with_, without):
        worker.figure(load, 0)
    pairs = []
    for turn in range(1, turns + 1):
        order = (with_, without) if turn % 2 else (without, with_)
        found = {worker: worker.figure(load, turn) for worker in order}
        pairs.append((found[with_], found[without]))
    return Row(
        name,
        load,
        statistics.median(pair[0] for pair in pairs),
        statistics.median(pair[1] for pair in pairs),
        tuple(LOADS[load].gain(*pair) for pair in pairs),
    )
