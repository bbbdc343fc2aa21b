"""Rows that take turns get the tokens that they'd get in every step."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.scheduler import Sequence
from engine.scheduler.decode_rotation import DecodeRotation, ShortStep
from engine.scheduler.prefill_budget import PrefillLimits
from tests.engine.speculative.test_equality import make, prompts, run, texts

Folder = Callable[[str], Path]
SETTINGS = {
    "in turn": {"async_scheduling": False},
    "ahead": {"async_scheduling": True},
    "drafts": {"speculative_config": {"method": "ngram"}},
    "preemptions": {"num_gpu_blocks_override": 24, "max_model_len": 128},
}


@pytest.fixture
def rested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each step that is held short, how many rows sit out."""
    counts: list[int] = []
    inner = DecodeRotation.skipped

    def spy(self: DecodeRotation, step: ShortStep) -> set[Sequence]:
        rows = inner(self, step)
        counts.append(len(rows))
        return rows

    monkeypatch.setattr(DecodeRotation, "skipped", spy)
    return counts


@pytest.fixture(scope="module")
def in_every_step(model_folder: Folder) -> Callable[[str], list[list[tuple[Any, ...]]]]:
    """family -> what its prompts get where no row sits out."""

    @functools.cache
    def get(family: str) -> list[list[tuple[Any, ...]]]:
        return texts(run(make(model_folder(family)), prompts(random.Random(family))))

    return get


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2-window"])
def test_every_way_of_choosing_gives_the_same_by_turns(
    family: str,
    how: str,
    model_folder: Folder,
    in_every_step: Callable[[str], list[list[tuple[Any, ...]]]],
    rested: list[int],
) -> None:
    settings: dict[str, Any] = SETTINGS[how]
    if family != "llama" and how == "preemptions":
        settings = {**settings, "num_gpu_blocks_override": 48}
    folder, asked = model_folder(family), prompts(random.Random(family))
    expected = in_every_step(family)
    assert not rested
    llm = make(folder, **settings)
    llm.core.scheduler.limits.share = PrefillLimits(
        16, saturation_decodes=2, min_step_tokens=4, target_step_tokens=6
    )
    llm.core.scheduler.kv.quotas.record_request("another")
    assert texts(run(llm, asked)) == expected
    assert sum(rows > 0 for rows in rested) > 20
