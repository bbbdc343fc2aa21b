"""The attention backend that an operator asks for is the one that runs, or is refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.devices import registry as find_devices
from engine.devices.registry import make_device
from tests.engine.models import Oracle, make_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5], [9, 8, 7] * 7, [60, 61, 62]]


def make(folder: Path, **settings: object) -> LLM:
    return LLM(
        str(folder), dtype="float32", num_gpu_blocks_override=60, max_model_len=64, device="cpu",
        **settings,
    )  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "FLEX_ATTENTION", "CPU_ATTN"])
def test_every_backend_of_a_cpu_gives_the_same_tokens(
    backend: str,
    family: str,
    model_folder: Callable[[str], Path],
    oracle: Callable[[str], Oracle],
) -> None:
    llm = make(model_folder(family), attention_backend=backend, max_num_batched_tokens=16)
    assert llm.core.executor.worker.loaded.model.ops.why.endswith(f"attention: {backend}")
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    token_ids = [output.outputs[0].token_ids for output in outputs]
    assert token_ids == oracle(family).greedy_all(PROMPTS, 8, token_ids)


def test_a_backend_of_another_device_is_refused_with_reasons(
    model_folder: Callable[[str], Path],
) -> None:
    with pytest.raises(ConfigError, match="device cpu not supported") as caught:
        make(model_folder("llama"), attention_backend="TRITON_ATTN")
    assert caught.value.param == "attention_backend"


def test_a_backend_that_cannot_do_what_the_model_needs_is_refused(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, model_type="gemma2", attn_logit_softcapping=30.0)
    with pytest.raises(ConfigError, match="soft cap"):
        make(folder, attention_backend="TORCH_SDPA")


def test_an_unknown_backend_is_refused(model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="FASTEST"):
        make(model_folder("llama"), attention_backend="FASTEST")


def test_a_gpu_that_is_not_there_is_refused(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device") as caught:
        LLM(str(model_folder("llama")), device="cuda")
    assert caught.value.param == "device"


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else find(name)
    )


def test_a_gpu_without_triton_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_triton(monkeypatch)
    with pytest.raises(ConfigError, match="pip install triton") as caught:
        make_device(EngineConfig(model="m", device="cuda"))
    assert caught.value.param == "device"
    baseline_kernels = make_device(
        EngineConfig(model="m", device="cuda", cpu_kernels=False)
    ).kernels
    assert (baseline_kernels.name, baseline_kernels.device.type) == ("reference", "cuda")


def test_auto_says_that_it_leaves_a_gpu_idle_for_want_of_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_triton(monkeypatch)
    find_devices._warn_unused_gpu.cache_clear()
    for _ in range(2):
        assert make_device(EngineConfig(model="m", device="auto")).name == "cpu"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "pip install triton" in line
    assert "--device cpu" in line
