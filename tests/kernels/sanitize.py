"""Runs the CPU kernels' tests on builds that watch themselves.

`python -m tests.kernels.sanitize address` looks for reads and writes outside of buffers and for
undefined behaviour, `... thread` for races of the pool. `--isa` picks the build (default: the
best), what follows goes to pytest. Needs GCC; the first run builds for some minutes. Ends with an
error where a test fails or something was found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from kernels.cpu.build import SANITIZE, SANITIZERS, find_compiler, library_for
from kernels.cpu.features import ISA, choose

ROOT = Path(__file__).resolve().parents[2]
RUNTIMES = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
TESTS = {
    "address": ["tests/kernels", "--ignore=tests/kernels/triton"],
    "thread": [
        f"tests/kernels/test_{name}.py"
        for name in ("threads", "linear", "decoder", "decoder_adapters", "step", "attention")
    ],
}
OPTIONS = {
    # Python and torch keep what they need until the end.
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # What torch's own threads do, the sanitizer can't see.
    "TSAN_OPTIONS": "die_after_fork=0:ignore_noninstrumented_modules=1",
}


def main() -> int:
    """The exit status of pytest, or of the sanitizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sanitizer", choices=sorted(SANITIZERS))
    parser.add_argument("--isa", default=None)
    options, more = parser.parse_known_args()
    compiler = find_compiler()
    if compiler is None:
        parser.error("there is no C++ compiler")
    os.environ[SANITIZE] = options.sanitizer
    variant = choose(options.isa)
    print(*library_for(variant), flush=True)  # without the sanitizer's runtime in the compiler
    preloaded = [_runtime(compiler, name) for name in RUNTIMES[options.sanitizer]]
    environment = {
        **os.environ, **OPTIONS, ISA: variant.isa, "LD_PRELOAD": " ".join(preloaded),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", variant.isa]
    # Addresses in their usual order: the thread sanitizer keeps its own beside them.
    fixed = [program, "-R"] if (program := shutil.which("setarch")) else []
    command = [*fixed, *pytest, *TESTS[options.sanitizer], *more]
    return subprocess.run(command, env=environment, cwd=ROOT).returncode


def _runtime(compiler: str, name: str) -> str:
    program = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(program).is_absolute():
        raise SystemExit(f"{compiler} has no {name}")
    return program


if __name__ == "__main__":
    sys.exit(main())
