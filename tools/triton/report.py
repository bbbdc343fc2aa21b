"""`python -m tools.triton.report`: compile all kernels, and say what they take of a GPU.

Needs no GPU. The main loop is the innermost one with most matrix products. Exits with 1 where a
kernel takes more shared memory than the GPU has or, with `--most-spilled`, more local memory than
that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kernels.triton.launch import INTERPRETED, Target, watch
from tools.triton.cases import CASES, CORE
from tools.triton.compiler import Compiled, compile_launch

SHARED = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that one program can have, by architecture."""
COLUMNS = (
    "case", "kernel", "sm", "registers", "spilled B", "shared B", "warps", "programs an SM",
    "instructions a loop", "matrix products", "16-byte loads", "copies under way",
    "powers beside products",
)  # fmt: skip
PROCESSORS = {80: 108, 89: 142, 90: 132, 100: 148, 120: 188}
ARCHITECTURES = (80, 90, 100)
"""Default architectures to compile for."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel of one case for one architecture; `launched` programs of it."""

    case: str
    arch: int
    compiled: Compiled
    launched: int = 0

    @property
    def fits(self) -> bool:
        """Whether the GPU can launch it."""
        return self.compiled.shared <= SHARED[self.arch]

    def as_json(self) -> dict[str, Any]:
        """Flat, for other programs."""
        row = dataclasses.asdict(self.compiled)
        code = row.pop("code")
        case = {"case": self.case, "arch": self.arch, "fits": self.fits, "launched": self.launched}
        return {**case, **row, **code}


def compile_all(arch: int, names: Iterable[str], disassemble: bool = True) -> Iterator[Row]:
    """The rows of the named cases."""
    launches: list[tuple[Any, int, tuple[Any, ...], dict[str, Any]]] = []

    def record_launch(
        kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: Any
    ) -> None:
        launches.append((kernel, math.prod(grid), args, options))

    for name in names:
        launches.clear()
        with watch(record_launch, Target(arch, PROCESSORS[arch], SHARED[arch])):
            CASES[name]()
        for kernel, launched, args, options in launches:
            compiled = compile_launch(kernel, args, options, arch, disassemble)
            yield Row(name, arch, compiled, launched)


def main() -> int:
    """Print a row a kernel; 1 where one doesn't fit."""
    parser = argparse.ArgumentParser(prog="python -m tools.triton.report", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="*", choices=sorted(SHARED), default=None)
    parser.add_argument(
        "--case", nargs="*", default=[""], help="only cases whose names hold one of these"
    )
    parser.add_argument("--core", action="store_true", help="only so many that each kernel is in")
    parser.add_argument("--most-spilled", type=int, metavar="BYTES", help="a thread")
    parser.add_argument("--no-code", action="store_true", help="don't read the machine code")
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    options = parser.parse_args()
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set: unset it, to compile")
    good = True
    if not options.json:
        print(f"| {' | '.join(COLUMNS)} |")
        print("|---" * len(COLUMNS) + "|")
    for arch in options.arch or ARCHITECTURES:
        names = CORE if options.core else CASES
        named = [name for name in names if any(part in name for part in options.case)]
        for row in compile_all(arch, named, not options.no_code):
            spilled = options.most_spilled
            good &= row.fits and (spilled is None or row.compiled.local <= spilled)
            print(json.dumps(row.as_json()) if options.json else _line(row), flush=True)
    return 0 if good else 1


def _line(row: Row) -> str:
    compiled, code = row.compiled, row.compiled.code
    matrix = f"{code.matrix}{' wgmma' if code.wgmma else ''}" if code.matrix else ""
    cells = (
        row.case, compiled.kernel, f"{row.arch}{'a' if row.arch >= 90 else ''}", compiled.registers,
        compiled.local, f"{compiled.shared}{'' if row.fits else ' (too much)'}",
        compiled.warps, compiled.programs, code.loop or "", matrix,
        f"{code.wide_loads} of {code.loads}",
        compiled.waits if compiled.waits >= 0 else "",
        f"{code.overlapped} of {code.powers}" if code.wgmma and code.powers else "",
    )  # fmt: skip
    return f"| {' | '.join(str(cell) for cell in cells)} |"


if __name__ == "__main__":
    sys.exit(main())
