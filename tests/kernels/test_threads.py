"""The pool of threads: any number of them, calls side by side, and forks."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels.cpu import CpuKernels
from kernels.cpu import memory as settings


@pytest.fixture
def thread_count(monkeypatch):
    """Let `use_threads` be called without a trace."""
    monkeypatch.setattr(settings, "_num_threads", None)


def test_any_number_of_threads_gives_the_same(compiled, thread_count):
    layer, x = compiled.PackedLinear(torch.randn(500, 300)), torch.randn(20, 300)
    expected = layer(x)
    for count in (2, 3, 8, 1):
        compiled.use_threads(count)
        assert torch.equal(layer(x), expected)


def test_torch_is_left_one_thread(compiled, thread_count):
    torch.set_num_threads(2)
    compiled.use_threads(2)
    assert torch.get_num_threads() == 1
    assert settings.num_threads() == 2


def test_threads_can_be_bound_to_cpus(thread_count):
    """In a process of its own: nothing unbinds the pool of this one."""
    child = os.fork()
    if child == 0:
        compiled = CpuKernels()
        layer, x = compiled.PackedLinear(torch.randn(600, 300)), torch.randn(8, 300)
        expected, cpus = layer(x), sorted(os.sched_getaffinity(0))
        compiled.use_threads(2, cpus)
        same = all(torch.equal(layer(x), expected) for _ in range(50))
        os._exit(0 if same and os.sched_getaffinity(0) == {cpus[0]} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_cpus_that_are_not_ours_are_refused(compiled, thread_count):
    with pytest.raises(ValueError, match="may not run"):
        compiled.use_threads(2, [100_000])
    with pytest.raises(ValueError, match="at least one"):
        compiled.use_threads(2, [])


def test_no_threads_at_all_are_refused(compiled, thread_count):
    with pytest.raises(ValueError, match="at least 1"):
        compiled.use_threads(0)


def test_many_short_calls_from_many_threads(compiled, thread_count):
    compiled.use_threads(3)
    x, weight = torch.randn(400, 128), torch.randn(128)
    expected = compiled.rms_norm(x, weight, 1e-6)

    def many(_):
        return all(torch.equal(compiled.rms_norm(x, weight, 1e-6), expected) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(many, range(4)))


def test_a_forked_child_starts_its_own_pool(compiled, thread_count):
    compiled.use_threads(2)
    layer, x = compiled.PackedLinear(torch.randn(600, 300)), torch.randn(8, 300)
    expected = layer(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(layer(x), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
