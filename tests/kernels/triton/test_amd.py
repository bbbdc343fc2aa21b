"""Every kernel compiles for AMD's GPUs, fits their shared memory and spills next to nothing.

Compiled only: no such GPU has run them. In a process of its own: here kernels are defined for the
interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest

from tests.kernels.triton.test_compile import KERNELS
from tools.triton.amd import GPUS

#: What every test run compiles, for the GPU whose threads have the fewest registers.
LARGEST, FEWEST_REGISTERS = ("prefill", "latent bf16"), "gfx1100"
#: Registers a thread, of 256 to 512.
MAX_SPILLED = 16
#: A latent of 512 values for each row doesn't fit the 256 registers of RDNA's threads.
SPILLS = {("gfx1100", kernel) for kernel in KERNELS if "latent_attention" in kernel}


@cache
def rows(arch: str, *more: str) -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tools.triton.amd", "--arch", arch, *more]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_rows(arch: str, report_rows: list[dict]) -> None:
    for row in report_rows:
        assert row["fits"], row
        assert row["spilled"] <= MAX_SPILLED or (arch, row["kernel"]) in SPILLS, row


@pytest.mark.timeout(600)
def test_the_largest_kernels_fit_the_fewest_registers() -> None:
    report_rows = rows(FEWEST_REGISTERS, "--core", "--case", *LARGEST)
    assert len({row["kernel"] for row in report_rows}) > 2
    check_rows(FEWEST_REGISTERS, report_rows)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", GPUS)
def test_every_kernel_compiles_for_amd(arch: str) -> None:
    report_rows = rows(arch, "--core")
    # Activations stay as they are beside fp8 weights.
    assert {row["kernel"] for row in report_rows} == KERNELS - {"round_rows_kernel"}
    check_rows(arch, report_rows)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", GPUS)
def test_every_form_fits_amds_gpus(arch: str) -> None:
    assert all(row["fits"] for row in rows(arch))
