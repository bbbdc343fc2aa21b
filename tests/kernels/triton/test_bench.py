"""The GPU benchmark's cases check themselves, and its rows count rightly; without a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels.bench.device_timing import GpuCeilings
from kernels.bench.gpu import main, row_of
from kernels.bench.gpu_cases import GpuCase, all_cases, compare, experts_case
from kernels.triton import TritonKernels
from kernels.triton.tune import main as tune


def test_every_case_agrees_with_the_reference():
    kernels = TritonKernels("cpu", "a test")
    for case in all_cases(kernels, small=True):
        case.check()
        case.run()
        assert case.bytes or case.flops


def test_experts_agree_with_a_plain_loop():
    experts_case(TritonKernels("cpu", "a test"), 3, experts=2, top_k=1, shape=(48, 24)).check()


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
    assert "no CUDA device" in capsys.readouterr().err
