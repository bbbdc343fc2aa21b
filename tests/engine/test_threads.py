"""Threads of the engine: how many, and on which CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.devices import threads as engine_threads
from engine.devices.threads import Threads, parse_cpus
from kernels.cpu import memory as settings
from kernels.reference import ReferenceKernels

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels' threads be set without a trace."""
    initial_num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # whatever ran in this process before
    monkeypatch.setattr(settings, "_num_threads", None)
    monkeypatch.setattr(engine_threads, "_initial_count", None)
    yield
    torch.set_num_threads(initial_num_threads)


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", (0,)), ("0-1", (0, 1)), ("3, 0-1,7", (3, 0, 1, 7)), ("5-5", (5,))]
)
def test_lists_of_cpus(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "3-1", "0,0", "0-2,1", "0;1", "1e3"])
def test_what_names_no_cpus_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cpu_threads_bind"):
        parse_cpus(text)


def test_cpus_that_are_not_ours_are_refused() -> None:
    config = EngineConfig(model="m", cpu_threads_bind="99998-99999")
    with pytest.raises(ConfigError, match="may not run on all"):
        Threads.from_config(config, ReferenceKernels())


def test_more_threads_than_cpus_are_refused() -> None:
    cpu = min(os.sched_getaffinity(0))
    config = EngineConfig(model="m", cpu_threads_bind=str(cpu), num_threads=2)
    with pytest.raises(ConfigError, match="more than the 1 CPUs"):
        Threads.from_config(config, ReferenceKernels())


def test_the_count_is_that_of_the_cpus_else_the_kernels(thread_count: None) -> None:
    cpu = min(os.sched_getaffinity(0))
    bound = Threads.from_config(
        EngineConfig(model="m", cpu_threads_bind=str(cpu)), ReferenceKernels()
    )
    assert bound == Threads(1, (cpu,))
    free = Threads.from_config(
        EngineConfig(model="m", cpu_threads_bind="nobind"), ReferenceKernels()
    )
    assert free == Threads(torch.get_num_threads(), (), bind_across=False)
    counted = Threads.from_config(EngineConfig(model="m", num_threads=3), ReferenceKernels())
    assert counted == Threads(3)


@pytest.mark.parametrize("bind", ["auto", "nobind"])
def test_a_native_model_leaves_torch_one_thread_and_the_kernels_all(
    bind: str, model_folder: Callable[[str], Path], thread_count: None
) -> None:
    options = {"num_gpu_blocks_override": 50, "max_model_len": 128, "async_scheduling": False}
    folder = str(model_folder("llama"))
    llm = LLM(folder, num_threads=2, cpu_threads_bind=bind, **options)
    two = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert (torch.get_num_threads(), settings.num_threads()) == (1, 2)
    llm = LLM(folder, num_threads=1, **options)
    one = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert settings.num_threads() == 1
    assert one == two


def test_bound_threads_are_bound_where_steps_run() -> None:
    """The kernels get the CPUs; that they keep to them is the kernels' own test."""
    calls = []

    class Recording(ReferenceKernels):
        def use_threads(self, count: int, cpus: Any = None, *, spread: bool = True) -> None:
            calls.append((count, cpus, spread))

    Threads(2, (1, 0)).use(Recording())
    Threads(3, (), bind_across=False).use(Recording())
    assert calls == [(2, (1, 0), True), (3, None, False)]
