"""Every kernel compiles, fits the GPU and spills next to nothing.

In processes of their own: here kernels are defined for the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest

from tools.triton.report import ARCHITECTURES, PROCESSORS

KERNELS = {
    "merge_kernel", "rope_kernel", "rope_latents_kernel", "rms_norm_kernel", "gate_kernel",
    "scan_kernel",
    "select_kernel", "gather_kernel", "choose_kernel", "sort_kernel", "search_kernel",
    "first_kernel", "embed_kernel", "penalize_kernel", "logprobs_kernel", "record_kernel",
    "edit_kernel", "bitmask_kernel", "slot_kernel",
    "conv_kernel", "history_kernel", "diagonal_kernel", "linear_scan_kernel",
    "attention_kernel", "split_attention_kernel", "reduce_kernel",
    "int8_product_kernel", "int4_product_kernel", "int4_few_rows_kernel", "fp8_product_kernel",
    "round_groups_kernel", "round_rows_kernel", "route_kernel", "count_kernel", "order_kernel",
    "gemm_kernel", "linear_kernel", "shrink_kernel", "expand_kernel",
    "expert_shrink_kernel", "expert_expand_kernel",
    "latent_attention_kernel", "split_latent_attention_kernel",
    "encoder_attention_kernel",
}  # fmt: skip
PERSISTENT = {"split_attention_kernel", "split_latent_attention_kernel"}
MAX_SPILLED = 64


def runs_at_once(row: dict) -> bool:
    """Whether a kernel whose programs share work has no more of them than the GPU runs at once."""
    if row["kernel"] not in PERSISTENT:
        return True
    return row["launched"] <= row["programs"] * PROCESSORS[row["arch"]]


#: Several reports by one process: to import Triton takes seconds.
REPORTS = """
import json, sys
from tools.triton.report import main
worst = 0
for sys.argv in json.loads(sys.argv[1]):
    worst = max(worst, main())
sys.exit(worst)
"""


def report(*reports: list[str]) -> list[dict]:
    """The rows of reports, each of which is its options."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    words = json.dumps([["report", "--json", *options] for options in reports])
    done = subprocess.run(
        [sys.executable, "-c", REPORTS, words], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


#: The case whose machine code is read.
FEW_INSTRUCTIONS = "int4 product, 8 rows"
#: Compiled every time; the others, and more, in slow tests.
EVERY_TIME = 90


@cache
def core(arch: int) -> list[dict]:
    few_instructions = ["--arch", str(arch), "--case", FEW_INSTRUCTIONS]
    return report(["--core", "--arch", str(arch), "--no-code"], few_instructions)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "arch",
    [pytest.param(arch, marks=[pytest.mark.slow] * (arch != EVERY_TIME)) for arch in ARCHITECTURES],
)
def test_every_kernel_compiles(arch):
    rows = core(arch)
    # Before 8.9 activations stay as they are beside fp8 weights.
    unused = {"round_rows_kernel"} if arch < 89 else set()
    assert {row["kernel"] for row in rows} == KERNELS - unused
    for row in rows:
        assert row["fits"], row
        assert row["local"] <= MAX_SPILLED, row
        assert 0 < row["registers"] <= 255
        assert runs_at_once(row), row


@pytest.mark.timeout(600)
def test_four_bits_are_unpacked_in_few_instructions():
    """A warp of an H200 may issue 0.22 of them for each byte of the weights that memory gives."""
    (row,) = (row for row in core(EVERY_TIME) if row["case"] == FEW_INSTRUCTIONS)
    unrolled, columns, bytes_of_a_column = 2, 64, 32
    issued = row["loop"] * row["warps"] / (unrolled * columns * bytes_of_a_column)
    assert issued < 0.22, row
    assert row["programs"] * row["warps"] >= 16, row


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", [89, 120])
def test_every_kernel_fits_the_small_shared_memory_of_consumer_gpus(arch):
    assert all(row["fits"] for row in report(["--arch", str(arch)]))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_form_compiles_and_spills_next_to_nothing():
    for row in report([]):
        assert row["fits"], row
        assert row["local"] <= MAX_SPILLED, row
        assert runs_at_once(row), row
