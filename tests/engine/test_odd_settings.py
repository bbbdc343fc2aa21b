"""Settings that no machine can follow are refused by their names, before memory is taken."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, AdapterLogitsProcessor
from engine.contract.errors import ConfigError
from engine.devices.cpu import CpuDevice
from engine.worker.input_batch import InputBatch
from tests.engine.pooling.models import make

Folder = Callable[[str], Path]
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    "invalid_options",
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
    invalid_options: dict[str, float], cpu_kernels: bool, model_folder: Folder
) -> None:
    with pytest.raises(ConfigError) as error:
        LLM(str(model_folder("llama")), cpu_kernels=cpu_kernels, **invalid_options)
    assert error.value.param == next(iter(invalid_options))


def test_as_many_sequences_as_there_may_be(model_folder: Folder) -> None:
    """Two of their rows are used: the others take no memory."""
    llm = LLM(str(model_folder("llama")), max_num_seqs=65536, num_gpu_blocks_override=9)
    assert [len(r.outputs) for r in llm.generate([[5, 6], [7]], use_tqdm=False)] == [1, 1]


@pytest.mark.parametrize(
    ("invalid_options", "text"),
    [
        ({"logits_processors": [3]}, "must be classes or texts such as 'module:Class', got 3"),
        ({"logits_processors": ["json"]}, "must be classes or texts such as 'module:Class'"),
        ({"logits_processors": ["no_such_module:A"]}, "No module named 'no_such_module'"),
        ({"logits_processors": ["json:Missing"]}, "has no attribute 'Missing'"),
        ({"logits_processors": ["json:JSONDecoder"]}, "is no subclass of engine.LogitsProcessor"),
        ({"logits_processors": [dict]}, "is no subclass of engine.LogitsProcessor"),
        (
            {"logits_processors": [AdapterLogitsProcessor], "speculative_config": NGRAM},
            "can't be used: speculative_config is set",
        ),
    ],
    ids=str,
)
def test_logits_processors_that_cannot_be(
    invalid_options: dict[str, Any], text: str, model_folder: Folder
) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)) as error:
        LLM(str(model_folder("llama")), num_gpu_blocks_override=9, **invalid_options)
    assert error.value.param == "logits_processors"


def test_logits_processors_of_a_device_that_has_no_use_for_them(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "runs_logits_processors", False)
    with pytest.raises(ConfigError, match="aren't supported on the device cpu"):
        LLM(str(model_folder("llama")), logits_processors=[AdapterLogitsProcessor])


def test_logits_processors_of_a_pooling_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a pooling model chooses no tokens"):
        LLM(str(make("bert", tmp_path / "bert")), logits_processors=[AdapterLogitsProcessor])


def test_tables_beyond_all_memory_are_refused_by_the_settings_that_ask_for_them() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs \(65536\) sequences") as error:
        InputBatch(65536, 1 << 40, 16)
    assert error.value.param == "max_num_seqs"
