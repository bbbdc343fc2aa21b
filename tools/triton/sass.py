"""Analyzes machine code: instructions of a kernel's main loop, and programs per SM."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_MATRIX = ("HMMA", "HGMMA", "QGMMA", "QMMA", "IMMA", "IGMMA", "DMMA", "UTCHMMA", "UTCQMMA")
_FROM_GLOBAL = ("LDG", "LDGSTS", "UBLKCP", "UTMALDG")
_SHARED_OF_SM = {80: 167_936, 89: 102_400, 90: 233_472, 100: 233_472, 120: 102_400}
_WARPS_OF_SM = {80: 64, 89: 48, 90: 64, 100: 64, 120: 48}
_REGISTERS_OF_SM = 65_536
_PROGRAMS_OF_SM = {80: 32, 89: 24, 90: 32, 100: 32, 120: 24}
_SHARED_BYTES_PER_PROGRAM = 1024
"""Bytes of shared memory per program that the driver reserves."""


@dataclass(frozen=True, slots=True)
class Code:
    """Instruction counts of machine code.

    Attributes:
        instructions: of the whole kernel.
        loop: instructions of an iteration of the main loop: of the innermost ones, the one with
            most matrix products, then most reads of global memory, then fewest instructions; 0
            without a loop.
        matrix: matrix products in that loop.
        wgmma: whether they are Hopper's, of four warps at once.
        loads, wide_loads: reads of global memory in the kernel, and those of 16 bytes a thread or
            more.
        powers, overlapped: powers of two in that loop (of a softmax, say), and those of them that
            are computed while Hopper's products are under way.
    """

    instructions: int
    loop: int
    matrix: int
    wgmma: bool
    loads: int
    wide_loads: int
    powers: int = 0
    overlapped: int = 0


def read(text: str) -> Code:
    """The figures of one kernel, from what `cuobjdump -sass` prints."""
    code = [
        (int(match[1], 16), match[2], match[3])
        for match in map(_INSTRUCTION.match, text.splitlines())
        if match is not None
    ]
    while code and code[-1][1] == "NOP":
        code.pop()
    bodies = [
        [(name, operands) for address, name, operands in code if low <= address <= high]
        for low, high in _innermost(code)
    ]
    main_body = min(bodies, key=lambda body: _rank([name for name, _ in body]), default=[])
    body = [name for name, _ in main_body]
    loads = [name for _, name, _ in code if name.split(".")[0] in _FROM_GLOBAL]
    wide = [name for name in loads if "128" in name or name.startswith("U")]
    matrix = [name for name in body if name.split(".")[0] in _MATRIX]
    wgmma = any(name.split(".")[0] in ("HGMMA", "QGMMA", "IGMMA") for name in matrix)
    powers = sum(name.startswith("MUFU.EX2") for name in body)
    return Code(
        len(code),
        len(body),
        len(matrix),
        wgmma,
        len(loads),
        len(wide),
        powers,
        _num_overlapped(main_body),
    )


def _num_overlapped(body: Sequence[tuple[str, str]]) -> int:
    """Powers of two of a loop between a product of four warps and the wait for it.

    What is under way at its end still is at its beginning.
    """
    under_way, is_overlapped = False, 0
    for turn in range(2):
        for name, operands in body:
            if name.startswith("HGMMA"):
                under_way = True
            elif name.startswith("WARPGROUP.DEPBAR") and operands.rstrip().endswith("0x0"):
                under_way = False
            elif turn and under_way and name.startswith("MUFU.EX2"):
                is_overlapped += 1
    return is_overlapped


def _rank(body: Sequence[str]) -> tuple[int, int, int]:
    matrix = sum(name.split(".")[0] in _MATRIX for name in body)
    loads = sum(name.split(".")[0] in _FROM_GLOBAL for name in body)
    return -matrix, -loads, len(body)


def _innermost(code: Sequence[tuple[int, str, str]]) -> list[tuple[int, int]]:
    """Return (first, last address) of loops that contain no other loop."""
    loops = []
    for address, name, operands in code:
        target = re.search(r"0x([0-9a-f]+)", operands) if name.startswith("BRA") else None
        if target is not None and int(target[1], 16) < address:
            loops.append((int(target[1], 16), address))
    return [
        (low, high)
        for low, high in loops
        if not any((a, b) != (low, high) and low <= a and b <= high for a, b in loops)
    ]


def programs_a_processor(arch: int, registers: int, shared: int, warps: int) -> int:
    """Return how many programs of a kernel run concurrently on one streaming multiprocessor."""
    by_warps = _WARPS_OF_SM[arch] // warps
    # Registers are allocated to warps in units of 256.
    by_registers = _REGISTERS_OF_SM // (max(1, -(-registers * 32 // 256)) * 256 * warps)
    by_shared = _SHARED_OF_SM[arch] // (shared + _SHARED_BYTES_PER_PROGRAM)
    return min(by_warps, by_registers, by_shared, _PROGRAMS_OF_SM[arch])
