"""Ranks that load blocks from a folder give one rank's tokens and log probabilities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.families.conftest import checkpoint
from tests.engine.kv_transfer.test_offloading import connector_of
from tests.engine.ranks.test_context_parallel import PLENTY, outputs
from tests.engine.ranks.test_tensor_parallel import running

__all__ = ["checkpoint"]

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.usefixtures("compiler"),
]

Folder = Callable[[str], Path]
LENGTHS = (1, 60, 130, 300)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("family", "size", "options"),
    [
        ("llama", 2, {}),
        ("llama", 2, {"kv_cache_dtype": "int8"}),
        ("llama", 1, {"pipeline_parallel_size": 2}),
        ("deepseek_v3", 2, {}),  # latents
        ("gpt_oss", 2, {}),  # windows
        ("qwen3_next", 2, {}),  # states
    ],
)
def test_ranks_that_load_blocks_give_the_bits_of_one(
    family: str,
    size: int,
    options: dict[str, Any],
    async_scheduling: bool,
    checkpoint: Folder,
    tmp_path: Path,
) -> None:
    folder, dtype = checkpoint(family), options.get("kv_cache_dtype", "auto")
    settings: dict[str, Any] = {"skip_tokenizer_init": True, **PLENTY}
    with running(folder, 1, kv_cache_dtype=dtype, **settings) as llm:
        expected = outputs(llm, LENGTHS)
    settings |= {
        "kv_offloading_size": 0.05,
        "kv_offloading_backend": str(tmp_path),
        "async_scheduling": async_scheduling,
    }
    for loads in (False, True):
        with running(folder, size, **settings, **options) as llm:
            # States are saved from a prompt's second use on.
            for _ in range(3):
                assert outputs(llm, LENGTHS) == expected
                assert llm.core.scheduler.kv.pool.reset_prefix_cache()
            connector = connector_of(llm.core)
            connector.wait_until_saved(10.0)
            assert not loads or connector.num_matched_tokens
            assert not llm.core.snapshot().kv_tier_failures_total
