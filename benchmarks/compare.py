"""Compare two checkouts, or two settings of the engine, that take turns.

    python -m benchmarks.compare MODEL --b quantization=int8
    python -m benchmarks.compare MODEL --b QUIRE_CPU_ISA=avx2 --loads one,prompt
    python -m benchmarks.compare MODEL --checkout-a ../before --settings dtype=bfloat16

Engines A and B run in processes of their own, for a process's second engine is some percent slower
than its first. In each turn both do the same work, in alternating order. Printed are the wall time
and the processor time of each load, medians with quartiles, and B's over A's: the median and the
quartiles of the turns' ratios, which a machine that slows down for both leaves alone. A ratio below
1 means that B is faster; quartiles on both sides of 1 mean noise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO

ROOT = Path(__file__).resolve().parents[1]


class Load(NamedTuple):
    """Requests that are submitted at once.

    Attributes:
        requests: number of requests.
        prompt: fewest and most tokens of a prompt.
        output: fewest and most tokens to generate.
        sampling: fields of `SamplingParams`; greedy by default.
    """

    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    sampling: Mapping[str, Any] = {"temperature": 0.0}


LOADS = {
    "one": Load(1, (8, 8), (64, 64)),
    "eight": Load(8, (8, 8), (64, 64)),
    "sampled": Load(1, (8, 8), (64, 64), {"temperature": 0.8, "top_p": 0.9}),
    "prompt": Load(1, (512, 512), (1, 1)),
    "many": Load(24, (128, 512), (64, 128)),
    "rows": Load(256, (8, 8), (32, 32)),
}
#: The first ids of most vocabularies are special tokens; all models have these.
_TOKEN_IDS = range(4, 256)


class EngineFailed(Exception):
    """An engine didn't start, or its process ended."""


class Engine:
    """An engine in a process of its own, which takes no processor time while it is idle."""

    def __init__(self, checkout: Path, model: str, options: Mapping[str, Any]) -> None:
        """`options`: settings of `LLM`; names in upper case are environment variables.

        Raises `EngineFailed`, with the last line that the process wrote, where it doesn't start.
        """
        # Without this the environment's own engine would be measured.
        if not (checkout / "engine" / "__init__.py").is_file():
            raise EngineFailed(f"{checkout} is no checkout: it has no engine/__init__.py.")
        variables = {name: str(value) for name, value in options.items() if name.isupper()}
        settings = {name: value for name, value in options.items() if not name.isupper()}
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            # -P: this folder has modules with names of the standard library's.
            [sys.executable, "-P", __file__, "--serve"],
            env={**os.environ, "PYTHONPATH": str(checkout), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        try:
            self._call({"model": model, **settings})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(self, load: str, seed: int) -> tuple[float, float]:
        """Wall and processor time of a load, in seconds."""
        wall, cpu = self._call([load, seed])
        return wall, cpu

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def _call(self, message: Any) -> Any:
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
            reply = self._process.stdout.readline()  # type: ignore[union-attr]
        except BrokenPipeError:
            reply = ""
        if not reply:
            self._process.wait()
            self._stderr.seek(0)
            lines = [line for line in self._stderr.read().splitlines() if line.strip()]
            raise EngineFailed(lines[-1] if lines else "The process ended without a message.")
        return json.loads(reply)


def submit(llm: Any, name: str, seed: int) -> None:
    """Run the requests of a load, which `seed` determines."""
    from engine import SamplingParams

    load, rng = LOADS[name], random.Random(seed)
    prompts = [rng.choices(_TOKEN_IDS, k=rng.randint(*load.prompt)) for _ in range(load.requests)]
    params = [
        SamplingParams(
            **load.sampling, seed=seed, max_tokens=rng.randint(*load.output), ignore_eos=True
        )
        for _ in prompts
    ]
    llm.generate(prompts, params, use_tqdm=False)


def serve(messages: TextIO, replies: TextIO) -> None:
    """Make the engine of the first message, then do a load for each of the others.

    Only the offline API is used, so that a checkout may be older or newer than this module.
    """
    from engine import LLM

    def reply(value: Any) -> None:
        print(json.dumps(value), file=replies, flush=True)

    llm = LLM(**json.loads(messages.readline()), skip_tokenizer_init=True)
    reply("ready")
    for message in messages:
        llm.reset_prefix_cache()
        wall, cpu = time.perf_counter(), time.process_time()
        submit(llm, *json.loads(message))
        reply([time.perf_counter() - wall, time.process_time() - cpu])


class Row(NamedTuple):
    """One kind of time of a load, in seconds; an element a turn."""

    load: str
    clock: str
    a: Sequence[float]
    b: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        """B's time over A's."""
        return [b / a for a, b in zip(self.a, self.b, strict=True)]


def compare(a: Engine, b: Engine, loads: Sequence[str], turns: int) -> Iterator[Row]:
    """Two rows a load, of wall and of processor time. A first turn isn't counted."""
    for load in loads:
        times: dict[Engine, list[tuple[float, float]]] = {a: [], b: []}
        for turn in range(turns + 1):
            for engine in (a, b) if turn % 2 else (b, a):
                times[engine].append(engine.run(load, turn))
        for index, clock in enumerate(("wall", "processor")):
            yield Row(load, clock, *([t[index] for t in times[engine][1:]] for engine in (a, b)))


def _spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    """The median and the quartiles."""
    low, median, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    )
    return f"{form(median)} ({form(low)} to {form(high)})"


def _options(words: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` words; a value is JSON or else text."""
    options: dict[str, Any] = {}
    for word in words:
        name, separator, text = word.partition("=")
        if not separator:
            raise SystemExit(f"{word!r} must be NAME=VALUE.")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options


def main(args: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="folder or GGUF file")
    for side in ("a", "b"):
        parser.add_argument(
            f"--{side}", nargs="+", default=[], metavar="NAME=VALUE",
            help=f"settings of {side.upper()}'s engine and environment variables",
        )  # fmt: skip
        parser.add_argument(
            f"--checkout-{side}", type=Path, default=ROOT, metavar="FOLDER",
            help=f"checkout that {side.upper()} runs (default: this one)",
        )  # fmt: skip
    parser.add_argument(
        "--settings", nargs="+", default=[], metavar="NAME=VALUE", help="the same for both engines"
    )
    parser.add_argument(
        "--loads", default=",".join(LOADS), help="comma-separated (default: %(default)s)"
    )
    parser.add_argument("--turns", type=int, default=9, help="counted turns (default: %(default)s)")
    options = parser.parse_args(args)
    loads = options.loads.split(",")
    if unknown := set(loads).difference(LOADS):
        parser.error(f"--loads must be of {', '.join(LOADS)}; got {', '.join(sorted(unknown))}")
    if options.turns < 1:
        parser.error(f"--turns must be at least 1; got {options.turns}")
    common = _options(options.settings)
    model = str(Path(options.model).resolve())
    try:
        with (
            Engine(options.checkout_a.resolve(), model, common | _options(options.a)) as a,
            Engine(options.checkout_b.resolve(), model, common | _options(options.b)) as b,
        ):
            line = "{:<8} {:<9} {:<26} {:<26} {}".format
            print(line("load", "clock", "A, ms", "B, ms", "B / A"))
            for row in compare(a, b, loads, options.turns):
                times = [_spread(values, lambda s: f"{1000 * s:,.1f}") for values in (row.a, row.b)]
                ratio = _spread(row.ratios, lambda x: f"{x:.3f}")
                print(line(row.load, row.clock, *times, ratio), flush=True)
    except EngineFailed as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        # What libraries print must not come between the replies.
        with os.fdopen(os.dup(1), "w", encoding="utf-8") as pipe:
            os.dup2(2, 1)
            serve(sys.stdin, pipe)
    else:
        main()
