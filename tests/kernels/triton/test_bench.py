"""The GPU benchmark's cases check themselves, and its rows count rightly; without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.kernels.device_timing import GpuCeilings
from benchmarks.kernels.gpu import main, row_of, run
from benchmarks.kernels.gpu_case import GpuCase, compare
from kernels.triton import launch
from kernels.triton.attention.tile_sizes import INTERPRETED
from tools.triton.tune import main as tune


def test_all_of_it_runs_in_small_and_agrees_with_the_reference():
    lines = []
    assert run(lines.append, as_json=True, smoke=True)
    rows = [json.loads(line) for line in lines[1:]]
    assert all(row["us"] > 0 and row["of_ceiling"] >= 0 for row in rows)
    assert {row["op"].split(",")[0] for row in rows} == {
        "decode", "prefill", "sample", "grammar mask", "penalties", "log probabilities",
        "add_rms_norm", "silu_and_mul", "rope", "merge of states", "experts", "linear", "lora",
        "latent decode", "latent prefill", "latent heads",
    }  # fmt: skip
    table = []
    run(table.append, only="merge", smoke=True)
    assert table[-1].startswith("| merge of states | 3 x 4 x 32 |")


def test_the_search_for_tiles_runs_in_small(capsys, monkeypatch):
    initial = dict(INTERPRETED)
    monkeypatch.setattr("sys.argv", ["tune", "--smoke"])
    assert tune() == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("Tile(" in line for line in lines) == 2 * 2 + 2
    assert initial == INTERPRETED
    monkeypatch.setattr("sys.argv", ["tune", "--smoke", "--phase", "decode", "--size", "64"])
    assert tune() == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("Tile(" in line for line in lines) == 2 + 1
    assert all("decode 64" in line for line in lines)


def test_what_is_wrong_is_found():
    with pytest.raises(ValueError, match="off by"):
        compare(torch.ones(4), torch.ones(4) * 1.1, 1e-2)
    with pytest.raises(ValueError, match="off by"):
        compare(torch.full((4,), float("nan")), torch.ones(4), 1e-2)


def test_a_row_is_a_part_of_its_ceiling():
    ceilings = GpuCeilings(copy=4e12, matmul=8e14)
    moving = GpuCase("a", "", lambda: None, lambda: None, bytes=2 * 10**9)
    assert row_of(moving, 1e-3, ceilings)["of_ceiling"] == 0.5
    working = GpuCase("b", "", lambda: None, lambda: None, flops=2 * 10**11)
    assert row_of(working, 1e-3, ceilings)["of_ceiling"] == 0.25


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench"])
    assert main() == tune() == 2
    assert capsys.readouterr().err == "torch sees no CUDA device.\n" * 2
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr("sys.argv", ["bench", "--smoke"])
    assert main() == tune() == 2
    assert capsys.readouterr().err.count("Set TRITON_INTERPRET=1 to run it on this CPU.") == 2


def test_a_name_that_no_case_has_is_named():
    lines = []
    assert not run(lines.append, only="decoed", smoke=True)
    assert lines[-1] == "No case's name holds 'decoed'."
