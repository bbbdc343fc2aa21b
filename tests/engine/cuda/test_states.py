"""Models whose layers carry a state, on a device that is never waited for."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils._pytree import register_dataclass

from engine import SamplingParams
from engine.models.layers import mamba
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


@pytest.mark.parametrize("name", ["falcon_h1", "recurrent_gemma", "zamba2"])
def test_steps_are_launched_ahead(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks beside decodes, then from a checkpoint: tokens equal those of transformers."""
    monkeypatch.setattr(fake_device, "KERNELS", (*fake_device.KERNELS, *STATE_KERNELS))
    monkeypatch.setattr(mamba, "to_device", lambda tensor, device: on_device(tensor.clone()))
    device = FakeDevice(monkeypatch)
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
