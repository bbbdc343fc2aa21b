"""`python -m tools.triton.amd`: compile all kernels for AMD's GPUs, and say what they take of one.

Needs no GPU: Triton's AMD back end makes machine code by LLVM. Exits with 1 where a kernel takes
more shared memory (LDS) than the GPU has or, with `--most-spilled`, more registers than that.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from kernels.triton.launch import INTERPRETED, Target, watch
from tools.triton.cases import CASES, CORE

#: Architecture -> (threads of a wave, compute units, bytes of LDS that one program can have):
#: MI250, MI300X, MI355X, RX 7900.
GPUS = {
    "gfx90a": (64, 104, 65_536),
    "gfx942": (64, 304, 65_536),
    "gfx950": (64, 256, 163_840),
    "gfx1100": (32, 96, 65_536),
}


@dataclass(frozen=True, slots=True)
class AmdRow:
    """One kernel of one case for one architecture.

    Attributes:
        registers: vector registers a thread. spilled: of them, to memory.
        shared: bytes of LDS a program.
    """

    case: str
    arch: str
    kernel: str
    registers: int
    spilled: int
    shared: int
    warps: int

    @property
    def fits(self) -> bool:
        """Whether the GPU can launch it."""
        return self.shared <= GPUS[self.arch][2]


@functools.cache
def _binder(kernel: Any, arch: str) -> tuple[Any, Any]:
    backend = make_backend(GPUTarget("hip", arch, GPUS[arch][0]))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def compile_all(arch: str, names: Iterable[str]) -> Iterator[AmdRow]:
    """The rows of the named cases."""
    wave, units, shared = GPUS[arch]
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def record(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: Any) -> None:
        if math.prod(grid):
            launches.append((kernel, args, options))

    for name in names:
        launches.clear()
        with watch(record, Target(0, units, shared, arch)):
            CASES[name]()
        for kernel, args, options in launches:
            backend, bind = _binder(kernel, arch)
            bound, spec, _ = bind(*args, **options)
            parsed, signature, constants, attributes = kernel._pack_args(
                backend, options, bound, spec, None
            )
            built = triton.compile(
                ASTSource(kernel, signature, constants, attributes),
                target=GPUTarget("hip", arch, wave),
                options=parsed.__dict__,
            )
            code = built.asm["amdgcn"]
            yield AmdRow(
                name,
                arch,
                kernel.__name__,
                _figure("vgpr_count", code),
                _figure("vgpr_spill_count", code),
                built.metadata.shared,
                built.metadata.num_warps,
            )


def _figure(name: str, code: str) -> int:
    """A figure of the machine code's metadata."""
    match = re.search(rf"\.{name}:\s+(\d+)", code)
    if match is None:
        raise ValueError(f"the machine code doesn't say {name}")
    return int(match[1])


def main() -> int:
    """Print a row a kernel; 1 where one doesn't fit."""
    parser = argparse.ArgumentParser(prog="python -m tools.triton.amd", description=__doc__)
    parser.add_argument("--arch", nargs="*", choices=sorted(GPUS), default=sorted(GPUS))
    parser.add_argument(
        "--case", nargs="*", default=[""], help="only cases whose names hold one of these"
    )
    parser.add_argument("--core", action="store_true", help="only so many that each kernel is in")
    parser.add_argument("--most-spilled", type=int, metavar="N", help="registers a thread")
    options = parser.parse_args()
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set: unset it, to compile")
    good = True
    for arch in options.arch:
        names = CORE if options.core else CASES
        named = [name for name in names if any(part in name for part in options.case)]
        for row in compile_all(arch, named):
            spills = options.most_spilled is not None and row.spilled > options.most_spilled
            good &= row.fits and not spills
            print(json.dumps(dataclasses.asdict(row) | {"fits": row.fits}), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
