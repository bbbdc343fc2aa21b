"""The features of this CPU, and the compiler flags that use them."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernels.errors import KernelsUnavailable

ISA = "QUIRE_CPU_ISA"
AVX2 = ("avx2", "fma", "f16c", "bmi2")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
NEEDS = {
    "avx512": (*AVX512, "avx512_vnni"),
    "avx512_core": AVX512,
    "avx2_vnni": (*AVX2, "avx_vnni"),
    "avx2": AVX2,
    "scalar": (),
}
"""CPU flags required by each variant, best variant first. "scalar" runs anywhere (4 lanes)."""

EXTRAS = {"avx512": ("avx512_bf16", "avx512vbmi")}
"""CPU flags that a variant uses if present."""

COMPILER_FLAG = {"avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16", "avx_vnni": "avxvnni"}
"""Compiler names that differ from the Linux kernel's."""


@dataclass(frozen=True)
class Variant:
    """A build of the library: an instruction set and the CPU features that it uses."""

    isa: str
    features: tuple[str, ...]

    @property
    def flags(self) -> list[str]:
        """The compiler's -m flags."""
        return [f"-m{COMPILER_FLAG.get(feature, feature)}" for feature in self.features]


@cache
def cpu_flags() -> frozenset[str]:
    """Return the CPU's feature flags by their Linux names; empty without /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def choose(isa: str | None = None) -> Variant:
    """Return the best variant for this CPU, or the one named by `isa` or QUIRE_CPU_ISA.

    Raises `KernelsUnavailable` for an unknown name or a variant that this CPU can't run.
    """
    requested = isa or os.environ.get(ISA)
    has = cpu_flags()
    able = [name for name, needs in NEEDS.items() if has.issuperset(needs)]
    if not requested:
        requested = able[0]
    if requested not in NEEDS:
        supported = ", ".join(NEEDS)
        raise KernelsUnavailable(f"{ISA} must be one of {supported}; got {requested!r}.", ISA)
    if requested not in able:
        missing = ", ".join(sorted(set(NEEDS[requested]) - has))
        raise KernelsUnavailable(
            f"{ISA} is {requested}, but this {platform.machine()} lacks {missing}.", ISA
        )
    extras = tuple(feature for feature in EXTRAS.get(requested, ()) if feature in has)
    return Variant(requested, NEEDS[requested] + extras)


def candidates(isa: str | None = None) -> list[Variant]:
    """Return the variant of `choose`, followed by lesser ones unless it was requested by name.

    A compiler or cache may be older than the CPU and lack the best variant. Raises like `choose`.
    """
    best = choose(isa)
    if isa or os.environ.get("QUIRE_CPU_ISA"):
        return [best]
    minimal = Variant(best.isa, NEEDS[best.isa])
    has, lesser = cpu_flags(), list(NEEDS)[list(NEEDS).index(best.isa) + 1 :]
    rest = [choose(name) for name in lesser if has.issuperset(NEEDS[name])]
    return [best, *([minimal] if minimal != best else []), *rest]
