"""The runner on a GPU: no step waits for the device, and sleep gives its memory back."""

from __future__ import annotations

import random

import pytest
import torch
import triton

from engine import LLM, SamplingParams
from engine.worker.gpu.model_runner import GpuModelRunner
from tests.engine.models import Oracle, make_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
RANDOM = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def gpu(device):
    if device != "cuda":
        pytest.skip("on a CPU, tests/engine/cuda has a device of its own for this")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model("llama", tmp_path_factory.mktemp("llama"))


def prompts(count=16):
    rng = random.Random(4)
    return [[rng.randrange(4, 384) for _ in range(rng.randint(1, 80))] for _ in range(count)]


def make(folder, **settings):
    settings = {"dtype": "float32", "num_gpu_blocks_override": 300, "max_model_len": 256,
                "cudagraph_capture_sizes": [1, 4, 16, 64]} | settings  # fmt: skip
    return LLM(str(folder), device="cuda", **settings)


def tokens(llm, params=GREEDY):
    return [o.outputs[0].token_ids for o in llm.generate(prompts(), params, use_tqdm=False)]


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_no_launch_waits_for_the_device(mode, params, folder, monkeypatch):
    """torch raises where the host would wait; the tokens come by an event, which it lets pass."""
    llm = make(folder, cudagraph_mode=mode, max_num_batched_tokens=64)
    expected = tokens(llm, params)  # kernels are compiled
    launch, launched = GpuModelRunner._launch, []

    def strict(self, *args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched.append(launch(self, *args))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return launched[-1]

    monkeypatch.setattr(GpuModelRunner, "_launch", strict)
    assert tokens(llm, params) == expected
    assert launched


def test_nothing_is_compiled_after_the_start(folder, monkeypatch):
    """100 prompts of random lengths, greedy and not, beside one another."""
    llm = make(folder, max_model_len=1024, num_gpu_blocks_override=4000, max_num_batched_tokens=256)
    names = []

    def record_compile(*args, **about):
        names.append(about["fn"].name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", record_compile)
    rng = random.Random(6)
    lengths = [rng.randint(1, 900) for _ in range(100)]
    texts = [[rng.randrange(4, 384) for _ in range(n)] for n in lengths]
    for params in (GREEDY, RANDOM):
        llm.generate(texts, params, use_tqdm=False)
    assert names == []


def test_mixed_batches(folder):
    oracle = Oracle(folder)
    llm = make(folder, max_num_batched_tokens=32)
    assert tokens(llm) == [oracle.greedy(prompt, 12) for prompt in prompts()]


@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_the_devices_memory_back(level, mode, tmp_path):
    folder = make_model("llama", tmp_path, hidden_size=1024, intermediate_size=4096)
    llm = make(folder, enable_sleep_mode=True, cudagraph_mode=mode, num_gpu_blocks_override=2000)
    expected = tokens(llm)
    initial_memory_reserved = torch.cuda.memory_reserved()
    kv = sum(
        cache.keys.nbytes + cache.values.nbytes
        for cache in llm.core.executor.worker.loaded.model.kv_caches
    )
    llm.sleep(level)
    # Weights of some 200 MB and the KV cache; what others of this process hold stays.
    assert initial_memory_reserved - torch.cuda.memory_reserved() > 0.9 * (kv + 180 * MIB)
    llm.wake_up(tags=["weights"])
    llm.wake_up(tags=["kv_cache"])
    assert tokens(llm) == expected
