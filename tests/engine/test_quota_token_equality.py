"""Tenants that take blocks from each other get the tokens that they would get alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from tests.engine.models import VOCAB

Folder = Callable[[str], Path]
#: Tenant -> reserved part, maximum.
QUOTAS = {"a": (0.0, 1.0), "b": (0.25, 1.0), "c": (0.0, 0.5)}


def prompts() -> list[tuple[str, list[int]]]:
    """(tenant, prompt) of 24 requests; some share a prefix."""
    rng = random.Random(3)
    stem = [rng.randrange(4, VOCAB) for _ in range(20)]
    return [
        (
            rng.choice("aabbc"),
            stem[: rng.choice((0, 9, 20))]
            + [rng.randrange(4, VOCAB) for _ in range(rng.randint(2, 30))],
        )
        for _ in range(24)
    ]


def run(core: EngineCore, jobs: list[tuple[str, list[int]]]) -> list[list[int]]:
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(jobs))}
    for index, (tenant, prompt) in enumerate(jobs):
        reserved, maximum = QUOTAS[tenant]
        core.add_request(
            EngineRequest(
                request_id=str(index),
                gateway_id="g",
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
                tenant=tenant,
                kv_reserved_fraction=reserved,
                kv_max_fraction=maximum,
            )
        )
    while core.has_work:
        for delta in core.step():
            assert delta.error is None
            tokens[delta.request_id] += delta.token_ids
        core.check_integrity()
    return list(tokens.values())


def make(folder: Path, **settings: Any) -> EngineCore:
    settings = {"num_gpu_blocks_override": 400, "block_size": 4, "max_model_len": 256, **settings}
    return EngineCore(EngineConfig(model=str(folder), dtype="float32", num_threads=1, **settings))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2-window"])
def test_tenants_preempt_each_other_and_change_no_token(
    family: str, ahead: bool, model_folder: Folder
) -> None:
    folder, jobs = model_folder(family), prompts()
    roomy = make(folder)
    expected = [run(roomy, [job])[0] for job in jobs]
    core = make(
        folder,
        num_gpu_blocks_override=40 if family == "llama" else 100,
        max_num_batched_tokens=24,
        async_scheduling=ahead,
    )
    assert run(core, jobs) == expected
    assert core.scheduler.num_preemptions > 5
    assert core.scheduler.kv.pool.num_free_blocks == core.capacity.num_blocks
