"""Ranks share models of the Transformers bridge by transformers' plans, with the bits of one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.core.engine_core import EngineCore
from engine.transformers_backend import load
from tests.engine.bridge.conftest import checkpoint
from tests.engine.models import make_model
from tests.engine.ranks import test_adapters
from tests.engine.ranks.test_tensor_parallel import outputs, resident_bytes, running
from tests.survey.bridged import BRIDGED, CROSS_CHECKED, STATEFUL

__all__ = ["checkpoint"]

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("compiler")]

Folder = Callable[[str], Path]
BRIDGE = {"model_impl": "transformers", "skip_tokenizer_init": True, "max_model_len": 256}
#: Without a plan for linear layers, or with parameters of attention that it splits.
REFUSED = dict.fromkeys(
    (
        *("afmoe", "bert", "bitnet", "ctrl", "diffllama", "granitemoeshared", "hunyuan_v1_dense"),
        *("hunyuan_v1_moe", "jetmoe", "modernbert-decoder", "nemotron_h-moe", "persimmon"),
        *("phimoe", "gpt2-by-layer", "opt-350m", "falcon_mamba", "biogpt", "gpt_oss"),
    ),
    "has no plan",
) | dict.fromkeys(("granite_swa", "granitemoe_swa", "mimo_v2_flash"), "local_params")


def both(folder: Path, size: int = 2, **settings: Any) -> tuple[Any, Any]:
    with running(folder, 1, **BRIDGE, **settings) as one:
        expected = outputs(one)
    with running(folder, size, **BRIDGE, **settings) as many:
        return expected, outputs(many)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        # Own heads, and few blocks; a norm over all heads, windows, and quantized weights.
        ("arcee", {"num_gpu_blocks_override": 6, "max_num_batched_tokens": 16}),
        pytest.param("olmo3", {"quantization": "int8"}, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_give_the_bits_of_one(
    family: str, options: dict[str, Any], checkpoint: Folder
) -> None:
    expected, output = both(checkpoint(family), **options)
    assert output == expected


def test_adapters_over_two_ranks_give_the_bits_of_one(checkpoint: Folder, tmp_path: Path) -> None:
    folder = checkpoint("arcee")
    first, second = (
        test_adapters.adapter(folder, tmp_path / str(seed), seed, rank=rank)
        for seed, rank in enumerate((3, 11))
    )
    requests = [first, None, second]
    results = []
    for size in (1, 2):
        with test_adapters.running(folder, size, max_model_len=256, max_loras=2) as llm:
            assert llm.core.executor.worker.adapters.refusal == ""
            results.append(test_adapters.outputs(llm, requests))
            expected = test_adapters.outputs(llm, [None] * 3)
            assert [ours == base for ours, base in zip(results[-1], expected, strict=True)] == [
                False, True, False,
            ]  # fmt: skip
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*BRIDGED, *STATEFUL, *CROSS_CHECKED])
def test_every_family_gives_the_tokens_of_one_or_is_refused(
    family: str, checkpoint: Folder
) -> None:
    if reason := REFUSED.get(family):
        with pytest.raises(ConfigError, match=reason):
            both(checkpoint(family))
        return
    expected, output = both(checkpoint(family))
    assert [tokens for tokens, _ in output] == [tokens for tokens, _ in expected]
    # torch computes the last columns that don't fill a vector in another way.
    for (_, ours), (_, theirs) in zip(output, expected, strict=True):
        assert ours == [pytest.approx(row, abs=1e-3) for row in theirs]


def test_a_rank_reads_its_share_of_the_file_and_has_its_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama", tmp_path / "1", hidden_size=512, intermediate_size=4096)
    shutil.copytree(tmp_path / "1", tmp_path / "2")
    num_read, num_heads, pack = list[int](), list[int](), load.pack
    for size in (1, 2):

        def measured(model: Any, *arguments: Any, folder: Path = tmp_path / str(size)) -> int:
            num_bytes = pack(model, *arguments)
            num_read.append(resident_bytes(folder / "model.safetensors"))
            return num_bytes

        monkeypatch.setattr(load, "pack", measured)
        with running(tmp_path / str(size), size, **BRIDGE) as llm:
            worker = llm.core.executor.worker
            num_heads.append(worker.loaded.model.layers[0].caches[0].shape[1])
            # Of all ranks together.
            head_bytes = 2 * 4 * worker.loaded.model.layers[0].size
            num_layers = worker.loaded.spec.num_layers
            assert worker.capacity.kv_bytes_per_token == num_layers * num_heads[0] * head_bytes
    assert num_heads[0] == 2 * num_heads[1]
    full, share = num_read
    assert full >= 0.9 * (tmp_path / "1" / "model.safetensors").stat().st_size
    assert share <= 1.05 * full / 2


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("biogpt", {}, "BioGptForCausalLM .* has no plan"),
        ("arcee", {"tensor_parallel_size": 4}, r"num_key_value_heads \(2\) can't be split evenly"),
        ("arcee", {"enable_expert_parallel": True}, "enable_expert_parallel can't be used"),
        pytest.param(
            "arcee",
            {"decode_context_parallel_size": 2},
            "decode_context_parallel_size can't be used",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_ranks_cannot_share_is_refused(
    family: str, options: dict[str, Any], reason: str, checkpoint: Folder
) -> None:
    settings = {"tensor_parallel_size": 2, **BRIDGE, **options}
    with pytest.raises(ConfigError, match=reason):
        EngineCore(EngineConfig(model=str(checkpoint(family)), **settings))
