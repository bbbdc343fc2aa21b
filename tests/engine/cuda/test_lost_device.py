"""After a step has failed on a GPU: what lay idle is given back, and a lost device is no use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine import SamplingParams
from tests.engine.cuda.fake_device import FakeDevice

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("lost", [False, True])
def test_a_failed_step_ends_the_engine_only_if_the_device_is_lost(
    lost: bool, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = FakeDevice(monkeypatch).engine(model_folder("llama"))
    executor, value_back = llm.core.executor, []

    def give_back() -> None:
        value_back.append(True)
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(executor.worker.device, "on_step_failed", give_back)
    runner = executor.worker._runner
    launch, calls = runner._launch, []

    def failing(*args: object) -> object:
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(*args)

    runner._launch = failing
    if lost:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    else:
        output = llm.generate([[5, 6, 7], [8, 9]], GREEDY, use_tqdm=False)[0]
        assert len(output.outputs[0].token_ids) == 4
    assert value_back == [True]
