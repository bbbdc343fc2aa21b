"""Each test of a kernel runs on the reference and on every build that this CPU can run.

QUIRE_CPU_ISA picks one of the builds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from kernels.cpu import CpuKernels
from kernels.cpu.features import NEEDS, cpu_flags
from kernels.interface import KernelSet
from kernels.reference import ReferenceKernels

REQUESTED_ISA = os.environ.get("QUIRE_CPU_ISA")
RUNNABLE = [
    isa
    for isa, needs in NEEDS.items()
    if cpu_flags().issuperset(needs) and REQUESTED_ISA in (None, "", isa)
]


#: Where both run, `avx512_core`, which is `avx512` without its dot products, is left to slow tests.
BUILDS = [
    pytest.param(isa, marks=[pytest.mark.slow] * (isa == "avx512_core" and "avx512" in RUNNABLE))
    for isa in RUNNABLE
]


@cache
def load(name: str) -> KernelSet:
    """The kernel set of that name, once for all tests."""
    return ReferenceKernels() if name == "reference" else CpuKernels(name)


@pytest.fixture(params=["reference", *BUILDS])
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    """Every implementation in turn."""
    return load(request.param)


@pytest.fixture(params=BUILDS)
def compiled(request: pytest.FixtureRequest) -> KernelSet:
    """Every compiled implementation in turn."""
    return load(request.param)


@pytest.fixture(autouse=True)
def single_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread unless a test asks for more: torch's pool is slow to meet on a busy machine."""
    monkeypatch.setattr("kernels.cpu.memory._num_threads", None)  # an engine's
    initial_num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(initial_num_threads)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, single_thread: None) -> int:
    """Run with that many threads."""
    torch.set_num_threads(request.param)
    return request.param
