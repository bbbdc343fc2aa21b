"""Eight-bit floats and integers, and four bits: the assembly that takes them apart on a GPU.

Triton's interpreter runs no assembly, so its few instructions are carried out here, by PTX's
definitions, for all pairs there are.
"""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
import torch

from kernels.triton.attention.tile import E4M3_PAIRS, E5M2_PAIRS, INT8_PAIRS
from kernels.triton.fp8 import E4M3_TO_BF16, E4M3_TO_F16
from kernels.triton.quantized.kernels import (
    HALVES_TO_BF16,
    HALVES_TO_BF16_LESS_8,
    HALVES_TO_F16,
    HALVES_TO_F16_LESS_8,
)

Register = np.ndarray


def halves(register: Register) -> list[np.ndarray]:
    return [(register & 0xFFFF).astype(np.uint16), (register >> 16).astype(np.uint16)]


def joined(parts: list[np.ndarray]) -> Register:
    low, high = (part.astype(np.uint32) for part in parts)
    return low | (high << np.uint32(16))


def look_up(a: Register, b: Register, c: Register, table: int) -> Register:
    """lop3: bit by bit, by a table of eight bits."""
    result = np.zeros_like(c)
    for index in range(8):
        if table >> index & 1:
            picked = [~x if not index >> bit & 1 else x for x, bit in ((a, 2), (b, 1), (c, 0))]
            result |= picked[0] & picked[1] & picked[2]
    return result


def permuted(a: Register, b: Register, selector: int) -> Register:
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(a)
    for index in range(4):
        byte = (both >> np.uint64(8 * (selector >> (4 * index) & 7))) & np.uint64(0xFF)
        result |= byte.astype(np.uint32) << np.uint32(8 * index)
    return result


def as_numbers(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16).copy()).view(dtype)


def fused(a: Register, b: Register, c: Register, dtype: torch.dtype) -> Register:
    parts = []
    for x, y, z in zip(halves(a), halves(b), halves(c)):
        x, y, z = (as_numbers(part, dtype).double() for part in (x, y, z))
        parts.append((x * y + z).to(dtype).view(torch.int16).numpy().view(np.uint16))
    return joined(parts)


def from_e4m3(pair: np.ndarray) -> Register:
    low, high = pair & 0xFF, pair >> 8
    parts = [
        torch.from_numpy(part.astype(np.uint8)).view(torch.float8_e4m3fn).half()
        for part in (low, high)
    ]
    return joined([part.view(torch.int16).numpy().view(np.uint16) for part in parts])


OPERATIONS = {
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "lop3.b32": lambda a, b, c, table: look_up(a, b, c, int(table.flat[0])),
    "prmt.b32": lambda a, b, selector: permuted(a, b, int(selector.flat[0])),
    "mov.b32": lambda a: a,
    "fma.rn.bf16x2": partial(fused, dtype=torch.bfloat16),
    "fma.rn.f16x2": partial(fused, dtype=torch.float16),
    "cvt.rn.f16x2.e4m3x2": from_e4m3,
}


def run(assembly: str, inputs: Register, outputs: int = 2) -> tuple[Register, ...]:
    """What an inline assembly of one input, which comes behind its outputs, gives."""
    registers: dict[str, np.ndarray] = {f"${outputs}": inputs}

    def value(name: str) -> np.ndarray:
        if name in registers:
            return registers[name]
        return np.full_like(inputs, int(name, 0))

    for line in assembly.strip("{} \n").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if operation in ("", ".reg"):
            continue
        together = re.fullmatch(r"\{(\w+), (\w+)\}, (\w+)", rest)
        if together:
            registers.update(zip(together.groups()[:2], halves(value(together[3]))))
            continue
        to, *operands = rest.split(", ")
        registers[to] = OPERATIONS[operation](*(value(name) for name in operands))
    return tuple(registers[f"${index}"] for index in range(outputs))


ALL = np.arange(1 << 16, dtype=np.uint32)


@pytest.mark.parametrize(
    ("assembly", "dtype", "wide"),
    [
        (E4M3_PAIRS, torch.float8_e4m3fn, torch.float16),
        (E5M2_PAIRS, torch.float8_e5m2, torch.float16),
        (INT8_PAIRS, torch.int8, torch.bfloat16),
    ],
    ids=["e4m3", "e5m2", "int8"],
)
def test_every_pair_of_bytes_becomes_its_two_values(assembly, dtype, wide):
    other = np.random.default_rng().permutation(ALL)
    outputs = run(assembly.value, joined([ALL, other]))
    for output, shift in zip(outputs, (0, 8)):
        for bits, pairs in zip(halves(output), (ALL, other)):
            byte = torch.from_numpy(((pairs >> shift) & 0xFF).astype(np.uint8))
            expected = byte.view(dtype).to(wide)
            assert torch.equal(as_numbers(bits, wide).nan_to_num(7), expected.nan_to_num(7))
            assert torch.equal(as_numbers(bits, wide).isnan(), expected.isnan())


@pytest.mark.parametrize(
    ("assembly", "wide"), [(E4M3_TO_BF16, torch.bfloat16), (E4M3_TO_F16, torch.float16)]
)
def test_four_floats_of_a_weight_become_their_values(assembly, wide):
    """In their order and with their signs; NaN, which no weight is, becomes 480."""
    draw = np.random.default_rng()
    permutations = [draw.permutation(np.arange(256, dtype=np.uint32).repeat(4)) for _ in range(4)]
    total = sum(
        permutation << np.uint32(8 * index) for index, permutation in enumerate(permutations)
    )
    outputs = [half for register in run(assembly.value, total) for half in halves(register)]
    for output, position in zip(outputs, permutations, strict=True):
        byte, got = torch.from_numpy(position.astype(np.uint8)), as_numbers(output, wide)
        assert torch.equal(got.signbit(), byte >= 0x80)
        size = (byte & 0x7F).view(torch.float8_e4m3fn).to(wide).nan_to_num(480.0)
        assert torch.equal(got.abs(), size)


@pytest.mark.parametrize(
    ("assembly", "wide", "less"),
    [
        (HALVES_TO_BF16, torch.bfloat16, 0), (HALVES_TO_BF16_LESS_8, torch.bfloat16, 8),
        (HALVES_TO_F16, torch.float16, 0), (HALVES_TO_F16_LESS_8, torch.float16, 8),
    ],
)  # fmt: skip
def test_halves_of_four_bytes_become_their_values(assembly, wide, less):
    """First the low ones in their order, then the high ones."""
    draw = np.random.default_rng()
    permutations = [draw.permutation(np.arange(256, dtype=np.uint32)) for _ in range(4)]
    total = sum(
        permutation << np.uint32(8 * index) for index, permutation in enumerate(permutations)
    )
    results = [half for register in run(assembly.value, total, 4) for half in halves(register)]
    expected = [(permutation & 15).astype(np.int16) for permutation in permutations]
    expected += [(permutation >> 4).astype(np.int16) for permutation in permutations]
    for got, values in zip(results, expected, strict=True):
        assert torch.equal(as_numbers(got, wide), torch.from_numpy(values - less).to(wide))
