"""The OpenVINO device: log probabilities of `transformers`, its variables and its refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.devices import registry
from engine.devices.conformance.checks import TOLERANCE
from engine.model_loader.model_impl import BuildRequest
from kernels.reference import ReferenceKernels
from tests.engine.models import Oracle, make_model
from tests.packages import DEVICE

pytest.importorskip("openvino", reason="packages/openvino isn't installed")
PROMPT = [5 + (7 * index) % 300 for index in range(41)]
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.5},
    "falcon": {"bias": False, "alibi": False, "num_kv_heads": 4, "parallel_attn": True},
    "gemma": {"head_dim": 16},
    "gpt_neox": {"rotary_pct": 0.5},
    "granite": {"residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "olmo2": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 1},
    "phi3": {"pad_token_id": 1},
    "starcoder2": {"sliding_window": None},
}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(DEVICE.with_name("openvino")))
    import quire_openvino

    monkeypatch.setattr(registry, "device_class", lambda name: quire_openvino.OpenVinoDevice)
    return quire_openvino


def make(folder: Path, **settings: Any) -> LLM:
    # `device` is "cpu" so that the settings don't look for an installed package.
    defaults = {"dtype": "float32", "num_gpu_blocks_override": 40, "max_model_len": 256}
    return LLM(str(folder), **{**defaults, "device": "cpu", **settings})


def distance(folder: Path, **settings: Any) -> float:
    """Largest distance of a prompt token's log probability from that of `transformers`."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    llm = make(folder, max_num_batched_tokens=16, **settings)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    llm.core.shutdown()
    scores = torch.log_softmax(Oracle(folder).logits(PROMPT), -1)
    rows = zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    return max(
        abs(row[token].logprob - float(scores[index, token]))
        for index, (row, token) in enumerate(rows)
    )


def test_log_probabilities_are_those_of_transformers(model_folder: Callable[[str], Path]) -> None:
    assert distance(model_folder("qwen2-window")) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_log_probabilities_of_more_families(family: str, tmp_path: Path) -> None:
    changes = {"model_type": family, **MORE_FAMILIES[family]}
    assert distance(make_model("llama", tmp_path, **changes)) <= TOLERANCE


def test_vllms_variables_round_weights_and_the_kv_cache_to_8_bits(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS", "ON")
    monkeypatch.setenv("VLLM_OPENVINO_CPU_KV_CACHE_PRECISION", "u8")
    monkeypatch.setenv("VLLM_OPENVINO_KVCACHE_SPACE", "1")
    llm = make(model_folder("llama"))
    config = llm.core.config
    assert (config.quantization, config.kv_cache_dtype) == ("int8", "int8")
    assert (config.cpu_kvcache_space, config.block_size) == (1, 32)
    ports = llm.core.executor.worker.loaded.model._compiled[1].inputs
    kinds = {port.any_name: port.element_type.get_type_name() for port in ports}
    assert kinds["key_cache.0"] == kinds["value_cache.2"] == "u8"
    llm.core.shutdown()
    # Rounding changes log probabilities a little.
    assert TOLERANCE < distance(model_folder("llama")) < 1


def test_settings_come_before_vllms_variables(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OPENVINO_CPU_KV_CACHE_PRECISION", "u8")
    config = EngineConfig(model="m", device="cpu", kv_cache_dtype="float16")
    device.apply_variables(config)
    assert config.kv_cache_dtype == "float16"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_OPENVINO_KVCACHE_SPACE", "much"),
        ("VLLM_OPENVINO_KVCACHE_SPACE", "-1"),
        ("VLLM_OPENVINO_KVCACHE_SPACE", "nan"),
        ("VLLM_OPENVINO_CPU_KV_CACHE_PRECISION", "u9"),
        ("VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS", "maybe"),
    ],
)
def test_invalid_values_of_variables_are_refused_by_name(
    device: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name} must be .*{value}") as refused:
        device.apply_variables(EngineConfig(model="m", device="cpu"))
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"quantization": "int4"}, "quantization"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype"),
        ({"model_impl": "transformers"}, "model"),
    ],
)
def test_settings_that_it_lacks_are_refused(
    model_folder: Callable[[str], Path], options: dict[str, Any], param: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make(model_folder("llama"), **options)
    assert refused.value.param == param


def test_a_rank_of_several_is_refused(device: Any, tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path), device="cpu")
    stage: Any = SimpleNamespace(size=2)
    kernels = ReferenceKernels()
    request = BuildRequest(tmp_path, {}, config, kernels, lambda done, total: None, stage=stage)
    with pytest.raises(ConfigError, match="can't be used for the device openvino") as refused:
        device.OpenVinoDevice(config).build_model(request)
    assert refused.value.param == "pipeline_parallel_size"


def test_weights_that_slept_are_read_again(
    model_folder: Callable[[str], Path], oracle: Callable[[str], Oracle]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    llm = make(model_folder("llama"), enable_sleep_mode=True)
    llm.sleep(2)
    llm.wake_up()
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == oracle("llama").greedy(PROMPT, 5)
    model = llm.core.executor.worker.loaded.model
    assert type(model).__name__ == "OpenVinoModel"
    llm.core.shutdown()
