"""The engine on the Triton kernels, in the interpreter: token-equal to `transformers`."""

from __future__ import annotations

import pytest

import kernels
from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError
from engine.models.layers.moe import GroupedMoe
from kernels.triton import TritonKernels, load
from tests.engine.models import Oracle, make_model
from tests.kernels.triton.sizes import FEW_HEADS

PROMPTS = [[5], [9, 8, 7, 6, 5, 4, 3, 9, 8, 7, 6, 5, 40, 41, 42, 43, 44], [60, 61, 62]]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_tokens_equal_those_of_transformers(family, forced, tmp_path):
    folder = make_model(family, tmp_path, num_hidden_layers=2, **FEW_HEADS)
    llm = LLM(
        str(folder), dtype="float32", num_gpu_blocks_override=40, max_model_len=64, device="cpu",
        max_num_batched_tokens=16,
    )  # fmt: skip
    assert isinstance(llm.core.executor.worker.loaded.model.ops, TritonKernels)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    oracle = Oracle(folder)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.greedy(prompt, 3)


def test_experts_run_fused(forced, tmp_path):
    folder = make_model(
        "llama", tmp_path, num_hidden_layers=2, model_type="qwen3_moe", num_experts=5,
        num_experts_per_tok=2, moe_intermediate_size=24, head_dim=16, **FEW_HEADS,
    )  # fmt: skip
    llm = LLM(
        str(folder), dtype="float32", num_gpu_blocks_override=40, max_model_len=64, device="cpu"
    )
    layers = llm.core.executor.worker.loaded.model.weights
    assert all(isinstance(layer.experts, GroupedMoe) for layer in layers)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    oracle = Oracle(folder)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.greedy(prompt, 3)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_quantized_weights_stay_small_and_run(quantization, forced, tmp_path):
    """int8 and int4 have the CPU's weights, so almost its logits; fp8 is the GPU's own."""
    folder = make_model("llama", tmp_path, num_hidden_layers=1, **FEW_HEADS)
    settings = {"dtype": "float32", "num_gpu_blocks_override": 40, "max_model_len": 64}
    llm = LLM(str(folder), device="cpu", quantization=quantization, **settings)
    layers = llm.core.executor.worker.loaded.model.weights
    full_weights = LLM(
        str(folder), device="cpu", **settings
    ).core.executor.worker.loaded.model.weights
    assert layers[0].nbytes < 0.5 * full_weights[0].nbytes  # rows are padded to groups of 128
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    together = llm.generate(PROMPTS[:2], params, use_tqdm=False)[1].outputs[0].token_ids
    (isolated_output,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
    assert isolated_output.outputs[0].token_ids == together
    assert len(together) == 2


def test_the_choice_says_why(forced):
    chosen = kernels.get("cpu")
    assert chosen.name == "triton"
    assert "interpreter" in chosen.why
    assert kernels.get("cpu") is chosen


def test_an_unknown_choice_is_refused(monkeypatch):
    monkeypatch.setenv(kernels.FORCED, "fastest")
    with pytest.raises(ValueError, match="QUIRE_KERNELS must be"):
        kernels.get("cpu")


def test_an_engine_names_the_setting_that_asks_for_unknown_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv(kernels.FORCED, "fastest")
    with pytest.raises(ConfigError, match="QUIRE_KERNELS must be") as raised:
        LLM(str(make_model("llama", tmp_path)), device="cpu")
    assert raised.value.param == "QUIRE_KERNELS"


def test_a_gpu_is_not_played_by_the_interpreter():
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        load("cuda")
