"""The parity probe passes sound adapters of each kind, and finds one that is run wrongly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.lora.check import check_adapter
from engine.models.lora import AdapterWeights, StepAdapters

from .adapters import DEMO_MODEL, PIRATE
from .peft_oracle import checkpoint, make_adapter
from .test_peft_equality import VARIANTS


@pytest.mark.parametrize(
    "variant",
    ["bias-of-b", "dora-with-biases", "grouped-rows", "transposed-dora", "embedding-and-head",
     "whole-embedding-and-head", "dora-of-scaled-embedding", "layer-by-layer"],
)  # fmt: skip
def test_sound_adapters_pass(tmp_path: Path, variant: str) -> None:
    recipe, options = VARIANTS[variant]
    model = checkpoint(recipe, tmp_path / "model")
    verdict = check_adapter(
        str(model), make_adapter(model, tmp_path / "adapter", **options), probe=True
    )
    assert verdict.error is None
    assert verdict.probe is not None
    assert verdict.probe.passed
    assert verdict.probe.max_difference < 1e-4


def test_a_wrongly_run_adapter_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def every_other_row(groups: list[tuple[AdapterWeights, torch.Tensor]]) -> StepAdapters:
        return StepAdapters([(adapter, rows[::2].contiguous()) for adapter, rows in groups])

    monkeypatch.setattr("engine.lora.parity_probe.StepAdapters", every_other_row)
    verdict = check_adapter(DEMO_MODEL, PIRATE, probe=True)
    assert not verdict.ok
    assert verdict.probe is not None
    assert not verdict.probe.passed
    assert verdict.error is not None


@pytest.mark.system
def test_the_command_probes() -> None:
    command = [sys.executable, "-m", "engine.lora.check", "--model", DEMO_MODEL, "--probe"]
    done = subprocess.run([*command, "--adapter", str(PIRATE)], capture_output=True, check=True)
    read, probed = map(json.loads, done.stdout.splitlines())
    assert read == probed | {"probe": None}  # said before the model is loaded
    probe = probed["probe"]
    assert probe["passed"] is True
    assert probe["prompts"] > 0
