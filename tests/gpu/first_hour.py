"""`python -m tests.gpu.first_hour`: everything that a GPU is to be asked first, step by step.

Each step has ten minutes at most, and its output a file in `--to`; a step that fails stops none of
the others. `--list` names the steps, `--only` takes those whose numbers begin so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

SECONDS = 600
"""Of a step, at most."""


class Step(NamedTuple):
    """A command; `python` stands for this interpreter. `empty_cache`: nothing compiled before."""

    number: str
    command: tuple[str, ...]
    empty_cache: bool = False

    def __str__(self) -> str:
        words = (f'"{word}"' if " " in word else word for word in self.command)
        cache = "TRITON_CACHE_DIR=$(mktemp -d) " if self.empty_cache else ""
        return f"{cache}{' '.join(words)}"


def _module(number: str, *words: str) -> Step:
    return Step(number, ("python", "-m", *words))


def _tests(number: str, file: str, chosen: str, *, new: bool = False) -> Step:
    options = ("-m", "gpu", "--confcutdir", "tests/gpu", f"tests/gpu/{file}.py", "-q", "-x")
    return Step(number, ("python", "-m", "pytest", *options, "-k", chosen), new)


STEPS = (
    _module("1.1", "benchmarks.kernels.gpu", "--smoke"),
    _module("1.2", "benchmarks.kernels.gpu", "--json", "--only", "decode"),
    _module("1.3", "benchmarks.kernels.gpu", "--json", "--only", "prefill"),
    _tests("2.1", "test_kernels", "test_attention or head_sizes or long or latents"),
    _tests("2.2", "test_kernels", "variations or fp8 or int8 or merge or rope or grouped or edits"),
    _tests("2.3", "test_kernels", "benchmark"),
    _tests("3.1", "test_runner", "waits or mixed"),
    _tests("3.2", "test_engine", "tokens_equal and llama"),
    _tests("3.3", "test_engine", "(adapters or drafts) and llama"),
    _tests("3.4", "test_engine", "latents"),
    _module("4", "benchmarks.gpu", "--no-transformers"),
    _module("5.1", "benchmarks.kernels.gpu", "--json", "--only", "linear"),
    _module("5.2", "benchmarks.kernels.gpu", "--json", "--only", "lora"),
    _module("5.3", "benchmarks.kernels.gpu", "--json", "--only", "sample"),
    _module("5.4", "benchmarks.kernels.gpu", "--json", "--only", "experts"),
    _module("5.5", "benchmarks.kernels.gpu", "--json", "--only", "latent"),
    _tests("6", "test_runner", "compiled", new=True),
    Step("7", ("compute-sanitizer", "python", "-m", "benchmarks.kernels.gpu", "--smoke", "--only",
               "decode")),
    _module("8", "tools.triton.tune", "--phase", "decode", "--size", "128"),
)  # fmt: skip


def run(step: Step, to: Path, environment: Mapping[str, str], seconds: float = SECONDS) -> str:
    """Run a step, its output into a file; what became of it, as a word or a few."""
    words = [sys.executable if word == "python" else word for word in step.command]
    with tempfile.TemporaryDirectory() as empty, open(to / f"{step.number}.txt", "w") as output:
        step_environment = (
            {**environment, "TRITON_CACHE_DIR": empty} if step.empty_cache else dict(environment)
        )
        try:
            done = subprocess.run(
                words,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=step_environment,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return f"took over {seconds:g} s"
        except FileNotFoundError:
            return f"{words[0]} isn't installed"
    return "ok" if done.returncode == 0 else f"failed ({done.returncode})"


def main() -> int:
    """Run the steps; 1 where one failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.first_hour", description=__doc__)
    parser.add_argument("--to", type=Path, default=Path("first-hour"), help="a folder for outputs")
    parser.add_argument("--only", default="", metavar="NUMBER", help="steps that begin so")
    parser.add_argument("--list", action="store_true", help="name the steps, and run none")
    options = parser.parse_args()
    steps = [step for step in STEPS if step.number.startswith(options.only)]
    if not steps:
        parser.error(f"no step's number begins with {options.only}")
    if options.list:
        print("\n".join(f"{step.number}  {step}" for step in steps))
        return 0
    if not torch.cuda.is_available():
        print("torch sees no CUDA device.", file=sys.stderr)
        return 2
    options.to.mkdir(parents=True, exist_ok=True)
    good = True
    for step in steps:
        started = time.monotonic()
        outcome = run(step, options.to, os.environ)
        good &= outcome == "ok"
        duration_s = time.monotonic() - started
        print(f"{step.number}  {step}: {outcome}, {duration_s:.0f} s", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
