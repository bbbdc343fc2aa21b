"""Heads that are a layer, beside a model whose steps are graphs: in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels
from engine import LLM, SamplingParams
from engine.devices.cpu import CpuDevice
from engine.devices.device import RunnerInputs
from engine.sampling.sampler import Sampler
from engine.worker.gpu.graph_dispatcher import BatchDescriptor, CUDAGraphRuntimeMode
from engine.worker.gpu.model_runner import GpuModelRunner
from engine.worker.gpu.setup import device_forward
from tests.engine.models import make_model
from tests.engine.speculative import test_eagle, test_mtp
from tests.engine.speculative.eagle_folders import eagle3_parts, eagle_parts
from tests.engine.speculative.free import make_drafts_free
from tests.engine.speculative.head_folders import write
from tests.engine.speculative.mtp_folders import glm_with_drafts
from tests.kernels.triton.test_graphs import NotingRecorder, replayed

CPU = torch.device("cpu")
#: Two likely tokens: some drafts hold, some don't.
BIASED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias=test_eagle.BIAS)
CHECK = (CUDAGraphRuntimeMode.FULL, BatchDescriptor(3, 1, True))
"""A step of one sequence with both of its drafts."""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that were replayed, in engines whose steps are a GPU's from here on."""
    make_drafts_free(monkeypatch)
    monkeypatch.setenv(kernels.FORCED, "triton")
    ops = kernels.get("cpu")
    for name in ("paged_attention", "mla_attention"):
        monkeypatch.setitem(vars(ops), name, getattr(ops, name))
    monkeypatch.setattr(ops, "attention_backend", "TRITON_ATTN")
    used: list[Any] = []

    def make_runner(self: CpuDevice, parts: RunnerInputs) -> GpuModelRunner:
        model, hidden = parts.loaded.model, parts.hidden
        assert hidden is not None
        hidden.warm_up(2)
        forward = device_forward(
            model, self.config, 8, [16], NotingRecorder, taps=hidden.aux_layers  # type: ignore[arg-type]
        )  # fmt: skip
        forward.capture()
        used.append(replayed(forward))
        parts.batch.decodes_first = True
        sampler = Sampler(parts.loaded.eos_token_ids, model.ops)  # type: ignore[attr-defined]
        return GpuModelRunner(model, parts.batch, sampler, forward, CPU, parts.masks, hidden)

    monkeypatch.setattr(CpuDevice, "make_runner", make_runner)
    return used


def drafting(folder: Path, **draft_settings: Any) -> LLM:
    return LLM(
        str(folder), dtype="float32", num_gpu_blocks_override=40, max_model_len=64, device="cpu",
        max_num_seqs=1, max_num_batched_tokens=8, block_size=4, async_scheduling=False,
        optimization_level=2, cudagraph_capture_sizes=[1, 3],
        speculative_config={"num_speculative_tokens": 2, **draft_settings},
    )  # fmt: skip


def generate_text(llm: LLM, prompt: list[int]) -> list[int]:
    (output,) = llm.generate([prompt], BIASED, use_tqdm=False)
    llm.core.check_integrity()
    stats = llm.core.stats
    accepted = stats.spec_decode_num_accepted_tokens_total
    assert 0 < accepted < stats.spec_decode_num_draft_tokens_total
    return list(output.outputs[0].token_ids)


PARTS: dict[str, Callable[[], Any]] = {"eagle": eagle_parts, "eagle3": eagle3_parts}


@pytest.mark.parametrize("method", PARTS)
def test_eagles_drafts_are_the_equations(method: str, recorded: list[Any], tmp_path: Path) -> None:
    """A prompt over three blocks, in pieces; states between layers come out of the graphs."""
    layers = 1 if method == "eagle" else 3
    folder = make_model("llama", tmp_path / "model", num_hidden_layers=layers)
    config, tensors = PARTS[method]()
    head_folder = write(tmp_path / "heads", config, tensors)
    llm = drafting(folder, method=method, model=str(head_folder))
    watch = test_eagle.watched(llm, folder, tensors)
    assert len(generate_text(llm, [*range(4, 14)])) == 8
    assert max(watch.depths) == 2
    assert not watch.mismatched_lengths
    assert recorded[0].count(CHECK) > 1


def test_a_checkpoints_own_layer_says_what_its_equation_does(
    recorded: list[Any], tmp_path: Path
) -> None:
    folder = glm_with_drafts(tmp_path, tables=True)
    llm = drafting(folder, method="mtp")
    watch = test_mtp.watched(llm, folder)
    assert len(generate_text(llm, [*range(4, 14)])) == 8
    assert max(watch.depths) == 2
    assert not watch.mismatched_lengths
    assert recorded[0].count(CHECK) > 1
