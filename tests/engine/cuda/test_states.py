"""Models whose layers carry a state, on a device that is never waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils._pytree import register_dataclass

from engine import SamplingParams
from engine.models.layers import mamba
from engine.worker.sampling_io import collect_outputs
from kernels.interface import ScanInputs, ScanWeights, StateRows
from tests.engine.cuda import fake_device
from tests.engine.cuda.fake_device import FakeDevice, on_device
from tests.survey.recipes import RECIPES
from tests.survey.tiny import Oracle, make_checkpoint

STATE_KERNELS = ("causal_conv", "linear_scan", "diagonal_scan")
PROMPTS = [[*range(4, 44)], [7, 8, 9], [60, 61]]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)

for parts in (StateRows, ScanInputs, ScanWeights):
    register_dataclass(parts)  # so that their tensors are found


def stateful_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    monkeypatch.setattr(fake_device, "KERNELS", (*fake_device.KERNELS, *STATE_KERNELS))
    monkeypatch.setattr(mamba, "to_device", lambda tensor, device: on_device(tensor.clone()))
    return FakeDevice(monkeypatch)


@pytest.mark.parametrize("name", ["falcon_h1", "recurrent_gemma", "zamba2"])
def test_steps_are_launched_ahead(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks beside decodes, then from a checkpoint: tokens equal those of transformers."""
    device = stateful_device(monkeypatch)
    make_checkpoint(RECIPES[name], tmp_path)
    llm, oracle = device.engine(tmp_path, max_num_batched_tokens=32), Oracle(tmp_path)
    expected = [oracle.greedy(prompt, 5) for prompt in PROMPTS]
    for _ in range(2):
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert llm.core.snapshot().prefix_cache_hits_total >= 32
    llm.core.check_integrity()
    launches = [step for kind, step in device.events if kind == "launch"]
    first_wait = device.events.index(("wait", 0))
    assert launches
    assert ("launch", 1) in device.events[:first_wait]


def test_states_of_steps_that_were_taken_back_are_computed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step fails behind which another was launched, and there are too few blocks for all."""
    device, calls = stateful_device(monkeypatch), list[None]()
    make_checkpoint(RECIPES["lfm2"], tmp_path)
    oracle = Oracle(tmp_path)
    prompts = [[*range(4, 44), *range(100 * n, 100 * n + 20)] for n in range(1, 4)]
    llm = device.engine(tmp_path, max_num_batched_tokens=32, num_gpu_blocks_override=8)

    def failing(*args: Any) -> None:
        calls.append(None)
        if len(calls) == 4:
            raise RuntimeError("an illegal address was met")
        collect_outputs(*args)

    monkeypatch.setattr("engine.worker.gpu.model_runner.collect_outputs", failing)
    expected = [oracle.greedy(prompt, 5) for prompt in prompts]
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    llm.core.check_integrity()
    assert llm.core.scheduler.num_preemptions > 0
