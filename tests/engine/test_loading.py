"""What a model that loads tells of itself: its phases, and how much of its weights it has read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.contract import replica_state as loading
from engine.contract.engine_config import EngineConfig
from engine.contract.replica_state import (
    CACHE,
    KERNELS,
    READING,
    WARM_UP,
    LoadPhase,
    observe_load_phases,
)
from engine.serving.service import load_core

Folder = Callable[[str], Path]


@pytest.mark.parametrize("more", [{}, {"quantization": "int8"}], ids=["plain", "int8"])
def test_phases_come_in_order_and_every_byte_is_counted(
    model_folder: Folder, more: dict[str, str]
) -> None:
    phases_seen: list[LoadPhase] = []
    folder = model_folder("llama")
    with observe_load_phases(phases_seen.append):
        core = load_core(EngineConfig(model=str(folder), num_gpu_blocks_override=8, **more), print)
    core.shutdown()
    phases = list(dict.fromkeys(phase.phase for phase in phases_seen))
    assert phases == [KERNELS, READING, CACHE, WARM_UP]
    read = [phase for phase in phases_seen if phase.phase == READING and phase.total]
    assert [phase.done for phase in read] == sorted(phase.done for phase in read)
    assert read[0].done == 0
    assert read[-1].done == read[-1].total
    assert 0 < read[-1].total <= (folder / "model.safetensors").stat().st_size


def test_nobody_is_told_afterwards() -> None:
    phases_seen: list[LoadPhase] = []
    with observe_load_phases(phases_seen.append):
        loading.report_load_phase(KERNELS)
    loading.report_load_phase(READING)
    assert [phase.phase for phase in phases_seen] == [KERNELS]
