"""Graphs and steps that are launched ahead, together: on recordings of Triton's interpreter."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import kernels
from engine import LLM, SamplingParams
from engine.executor.worker import Worker
from engine.sampling.sampler import Sampler
from engine.worker.gpu.model_runner import GpuModelRunner
from engine.worker.gpu.setup import device_forward
from tests.engine.models import Oracle, make_model
from tests.kernels.triton.test_graphs import NotingRecorder
from tests.survey.recipes import RECIPES
from tests.survey.tiny import Oracle as SurveyOracle
from tests.survey.tiny import make_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.mark.parametrize("name", ["falcon_h1", "recurrent_gemma"])
def test_decode_steps_of_models_with_states_are_graphs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, and steps that save states, run eagerly; graphs read the step's blocks of states."""
    make_checkpoint(RECIPES[name], tmp_path)
    monkeypatch.setenv(kernels.FORCED, "triton")
    ops = kernels.get("cpu")
    monkeypatch.setitem(vars(ops), "paged_attention", ops.paged_attention)
    monkeypatch.setattr(ops, "attention_backend", "TRITON_ATTN")
    replays = []
    captured_forwards = []

    def make_runner(worker: Worker, batch) -> GpuModelRunner:  # type: ignore[no-untyped-def]
        model = worker.loaded.model
        forward = device_forward(model, worker._config, 16, [2], NotingRecorder)
        forward.capture()
        captured_forwards.append(forward)
        for key, recorded in forward._recordings.items():
            recorded.steps.append(lambda key=key: replays.append(key[1].num_tokens))  # type: ignore[misc]
        batch.decodes_first = True
        sampler = Sampler(worker.loaded.eos_token_ids, ops)
        return GpuModelRunner(model, batch, sampler, forward, ops.device, worker._masks)

    monkeypatch.setattr(Worker, "_make_runner", make_runner)
    llm = LLM(
        str(tmp_path), dtype="float32", num_gpu_blocks_override=20, max_model_len=32, device="cpu",
        max_num_batched_tokens=16, max_num_seqs=3, async_scheduling=True,
        optimization_level=2, cudagraph_capture_sizes=[2, 4],
    )  # fmt: skip
    prompts = [[7, 8], [60, 61, 62, 9, 10, 11], [5, 99, 4]]
    oracle = SurveyOracle(tmp_path)
    expected = [oracle.greedy(prompt, 6) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for _ in range(2):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert [forward.num_captured for forward in captured_forwards] == [2]
    assert {4} <= {*replays} <= {2, 4}
    assert len(replays) >= 6
    llm.core.check_integrity()


def test_graphs_give_the_tokens_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come in chunks beside decodes; sizes are the operator's; a nap lies in between."""
    folder = make_model("llama", tmp_path, num_hidden_layers=1)
    monkeypatch.setenv(kernels.FORCED, "triton")
    ops = kernels.get("cpu")
    monkeypatch.setitem(vars(ops), "paged_attention", ops.paged_attention)
    monkeypatch.setattr(ops, "attention_backend", "TRITON_ATTN")
    captured_forwards = []

    def make_runner(worker: Worker, batch) -> GpuModelRunner:  # type: ignore[no-untyped-def]
        model = worker.loaded.model
        forward = device_forward(model, worker._config, 8, [2], NotingRecorder)
        forward.capture()
        batch.decodes_first = True
        captured_forwards.append(forward)
        sampler = Sampler(worker.loaded.eos_token_ids, ops)
        return GpuModelRunner(model, batch, sampler, forward, ops.device, worker._masks)

    monkeypatch.setattr(Worker, "_make_runner", make_runner)
    llm = LLM(
        str(folder), dtype="float32", num_gpu_blocks_override=20, max_model_len=32, device="cpu",
        max_num_batched_tokens=8, max_num_seqs=4, async_scheduling=True, enable_sleep_mode=True,
        optimization_level=2, cudagraph_capture_sizes=[2, 8],
    )  # fmt: skip
    rng = random.Random(3)
    prompts = [[rng.randrange(4, 384) for _ in range(n)] for n in (2, 9)]
    oracle = Oracle(folder)
    expected = [oracle.greedy(prompt, 3) for prompt in prompts]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    llm.sleep(1)
    llm.wake_up()
    again = llm.generate(prompts[:1], GREEDY, use_tqdm=False)
    assert again[0].outputs[0].token_ids == expected[0]
    # Whole ones of 2 and of all 4 decodes, and pieces of 2 and of 8 tokens; after the nap too.
    assert [forward.num_captured for forward in captured_forwards] == [4, 4]
