"""Quantized checkpoints on the Triton kernels, in the interpreter: what they keep as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from kernels.triton.quantized import GroupedExperts
from tests.engine.checkpoints import writers
from tests.engine.checkpoints.folders import make_mxfp4, make_pair
from tests.engine.checkpoints.test_formats import FORMATS, GREEDY, PROMPT, SCORED
from tests.engine.checkpoints.test_models import GPTQ, split_experts
from tests.engine.models import Oracle, make_model
from tests.kernels.triton.sizes import FEW_HEADS
from tests.survey.recipes import RECIPES
from tests.survey.tiny import make_checkpoint

pytestmark = pytest.mark.usefixtures("forced")

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 20, "max_model_len": 64,
}  # fmt: skip


SMALL: dict[str, Any] = {"num_hidden_layers": 1, "intermediate_size": 128, **FEW_HEADS}
TWO = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def levels(llm, part):
    return {report.level for report in llm.load_report() if part in report.layer}


@pytest.mark.parametrize(
    ("name", "near"),
    [("gptq-4-sorted", 0.05), ("fp8-row", 0.6), ("fp8-block", 0.6), ("ct-fp8-tensor", 0.6)],
)
def test_layers_stay_as_they_are(name, near, tmp_path):
    """Activations are rounded to e4m3 beside weights of that; int4 has minima of float16."""
    source = make_model("llama", tmp_path / "source", **SMALL)
    pair = make_pair(source, tmp_path, FORMATS[name].config, FORMATS[name].write)
    llm = LLM(str(pair.packed), **SETTINGS)
    assert levels(llm, "_proj") == {"kept"}
    down = llm.core.executor.worker.loaded.model.weights[0].mlp.down
    baseline = pair.weights["model.layers.0.mlp.down_proj"]
    torch.testing.assert_close(
        down.rows(torch.arange(len(baseline))), baseline, rtol=1e-3, atol=1e-3
    )
    expected_logprobs = Oracle(pair.dense).logprobs(PROMPT)
    scores = llm.generate([PROMPT], SCORED, use_tqdm=False)[0].prompt_logprobs
    logprobs = [entry[token].logprob for token, entry in zip(PROMPT[1:], scores[1:], strict=True)]
    expected = [float(expected_logprobs[index, token]) for index, token in enumerate(PROMPT[1:])]
    assert logprobs == pytest.approx(expected, abs=near)


def test_experts_stay_as_they_are_all_at_once(tmp_path):
    """Int4 leaves activations as they are, so tokens are those of the weights it stands for."""
    source = tmp_path / "source"
    make_checkpoint({**RECIPES["mixtral"], "intermediate_size": 64, **FEW_HEADS}, source)
    split_experts(source)

    def chosen(name):
        return ".experts." in name and name.endswith(".weight")

    pair = make_pair(source, tmp_path, GPTQ, writers.gptq(symmetric=False), chosen)
    llm = LLM(str(pair.packed), **SETTINGS)
    layers = llm.core.executor.worker.loaded.model.weights
    assert all(isinstance(layer.experts, GroupedExperts) for layer in layers)
    assert levels(llm, ".experts.") == {"kept"}
    token_ids = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert token_ids == Oracle(pair.dense).greedy(PROMPT, 6)


@pytest.mark.parametrize("name", ["bnb-nf4", "nvfp4"])
def test_forms_that_no_kernel_multiplies_are_read(name, tmp_path):
    """Into floats; and stand for what they did."""
    source = make_model("llama", tmp_path / "source", **SMALL)
    pair = make_pair(source, tmp_path, FORMATS[name].config, FORMATS[name].write)
    llm = LLM(str(pair.packed), **SETTINGS)
    assert levels(llm, "_proj") == {"read"}
    down = llm.core.executor.worker.loaded.model.weights[0].mlp.down
    baseline = pair.weights["model.layers.0.mlp.down_proj"]
    torch.testing.assert_close(
        down.rows(torch.arange(len(baseline))), baseline, rtol=1e-3, atol=1e-3
    )
    token_ids = llm.generate([PROMPT], TWO, use_tqdm=False)[0].outputs[0].token_ids
    assert token_ids == Oracle(pair.dense).greedy(PROMPT, 2)


def test_the_experts_of_gpt_oss_are_read(tmp_path):
    make_checkpoint({**RECIPES["gpt_oss"], **FEW_HEADS}, tmp_path / "source")
    mxfp4 = make_mxfp4(tmp_path / "source", tmp_path)
    llm = LLM(str(mxfp4.packed), **SETTINGS)
    assert {report.level for report in llm.load_report() if report.format == "mxfp4"} == {"read"}
    token_ids = llm.generate([PROMPT], TWO, use_tqdm=False)[0].outputs[0].token_ids
    assert token_ids == Oracle(mxfp4.dense).greedy(PROMPT, 2)
