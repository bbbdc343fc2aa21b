"""Bridged and pooling models on a GPU: as `transformers` has them, and as on a CPU."""

from __future__ import annotations

import pytest
import torch

from engine import LLM, SamplingParams
from tests.engine.models import Oracle, make_model
from tests.engine.pooling.models import TEXTS, make

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5] * 20, [7, 8, 9], list(range(10, 50)), [60]]
BRIDGED = {
    "llama": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gemma2": {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                  "head_dim": 16},
    "mamba": {"state_size": 4, "expand": 2, "conv_kernel": 4, "time_step_rank": 4},
}  # fmt: skip


@pytest.fixture(autouse=True)
def gpu(device):
    if device != "cuda":
        pytest.skip("tests/engine/cuda/test_placement.py sees to where tensors are")


@pytest.mark.parametrize("kind", BRIDGED)
def test_bridged_models_equal_transformers(kind, tmp_path):
    folder = make_model("llama", tmp_path, num_hidden_layers=2, model_type=kind, **BRIDGED[kind])
    llm = LLM(
        str(folder), device="cuda", model_impl="transformers", dtype="float32",
        num_gpu_blocks_override=64, max_model_len=128, max_num_batched_tokens=32,
    )  # fmt: skip
    assert llm.core.executor.worker.device.torch_device.type == "cuda"
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    oracle = Oracle(folder)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.greedy(prompt, 8)


def test_a_bridged_model_in_bf16_fills_the_memory_that_is_left(tmp_path):
    folder = make_model("llama", tmp_path)
    llm = LLM(str(folder), device="cuda", model_impl="transformers", dtype="bfloat16",
              gpu_memory_utilization=0.3, max_model_len=128)  # fmt: skip
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["bert", "mpnet", "modernbert", "nomic_bert", "llama", "qwen3"])
def test_embeddings_are_those_of_the_cpu(kind, dtype, tmp_path):
    folder = make(kind, tmp_path)
    settings = {"runner": "pooling", "max_model_len": 128, "num_gpu_blocks_override": 64}
    remote_llm = LLM(str(folder), device="cuda", dtype=dtype, **settings)
    local_llm = LLM(str(folder), device="cpu", dtype="float32", **settings)
    tensor, expected = (
        torch.tensor([o.outputs.embedding for o in llm.embed(TEXTS, use_tqdm=False)])
        for llm in (remote_llm, local_llm)
    )
    allowed = 1e-4 if dtype == "float32" else 0.05
    assert float((tensor - expected).norm(dim=-1).max()) < allowed
