"""Settings that no machine can follow are refused by their names, before memory is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine import LLM
from engine.contract.errors import ConfigError
from engine.worker.batch import RunningBatch

Folder = Callable[[str], Path]


@pytest.mark.parametrize(
    "wanted",
    [
        {"num_gpu_blocks_override": 1 << 24, "block_size": 128},
        {"num_gpu_blocks_override": 10**17},
        {"num_gpu_blocks_override": 10**25},
        {"cpu_kvcache_space": 1e300},
        {"cpu_kvcache_space": float("inf")},
        {"num_threads": 10**12},
    ],
    ids=str,
)
@pytest.mark.parametrize("cpu_kernels", [True, False])
def test_sizes_that_cannot_be(
    wanted: dict[str, float], cpu_kernels: bool, model_folder: Folder
) -> None:
    with pytest.raises(ConfigError) as error:
        LLM(str(model_folder("llama")), cpu_kernels=cpu_kernels, **wanted)
    assert error.value.param == next(iter(wanted))


def test_as_many_sequences_as_there_may_be(model_folder: Folder) -> None:
    """Two of their rows are used: the others take no memory."""
    llm = LLM(str(model_folder("llama")), max_num_seqs=65536, num_gpu_blocks_override=9)
    assert [len(r.outputs) for r in llm.generate([[5, 6], [7]], use_tqdm=False)] == [1, 1]


def test_tables_beyond_all_memory_are_refused_by_the_settings_that_ask_for_them() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs \(65536\) sequences") as error:
        RunningBatch(65536, 1 << 40, 16)
    assert error.value.param == "max_num_seqs"
