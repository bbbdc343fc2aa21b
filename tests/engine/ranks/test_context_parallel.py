"""Ranks that have all heads of some tokens each give one rank's tokens and log probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from engine import LLM, SamplingParams
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.core.engine_core import EngineCore
from engine.devices.cuda import CudaDevice
from engine.devices.registry import make_device
from engine.models.registry import decoder_spec
from engine.models.sharding import ModelShard
from kernels.interface import RankGroup
from tests.engine.families.conftest import checkpoint
from tests.engine.families.test_refusals import config
from tests.engine.kv_transfer.test_offloading import forget_kv_cache, make, prompt, run
from tests.engine.ranks.test_tensor_parallel import Outputs, running
from tests.engine.ranks.test_tiers import running as tiered
from tests.survey.tiny import prompts

__all__ = ["checkpoint"]

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("compiler")]

Folder = Callable[[str], Path]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
DEALT = {"decode_context_parallel_size": 2}
PLENTY = {"num_gpu_blocks_override": 128}
#: Latents; sinks and windows; states; a soft cap; ALiBi; experts; blocks; states and latents.
FAMILIES = (
    "deepseek_v3", "gpt_oss", "qwen3_next", "gemma2", "bloom", "mixtral", "phi3small",
    "kimi_linear",
)  # fmt: skip


def outputs(llm: LLM, lengths: tuple[int, ...] = (1, 130, 300, 460)) -> Outputs:
    """Of prompts with several tiles of attention, and decodes that begin a new one (at 256)."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts((*lengths, 254))]
    return [
        (
            list(result.outputs[0].token_ids),
            [
                {token: entry.logprob for token, entry in row.items()}
                for row in result.outputs[0].logprobs or []
            ],
        )
        for result in llm.generate(inputs, PARAMS, use_tqdm=False)
    ]


@pytest.mark.parametrize(
    ("family", "size", "options"),
    [
        # A small cache: some are preempted, and later find blocks of their prompts.
        ("llama", 2, {"kv_cache_dtype": "int8", "num_gpu_blocks_override": 4}),
        pytest.param("mistral", 4, {"max_num_batched_tokens": 256}, marks=pytest.mark.slow),
    ],
)
def test_ranks_with_some_tokens_each_give_the_bits_of_one(
    family: str, size: int, options: dict[str, Any], checkpoint: Folder
) -> None:
    folder = checkpoint(family)
    with running(folder, 1, skip_tokenizer_init=True, **{**options, **PLENTY}) as llm:
        expected = outputs(llm)
    with running(folder, size, skip_tokenizer_init=True, **options, **DEALT) as llm:
        assert outputs(llm) == expected
        assert outputs(llm) == expected  # with blocks of the prefix cache
        model = llm.core.executor.worker.loaded.model
        keys = model.kv_caches[0].keys
        assert keys.shape[1:3] == (model.full_spec.num_kv_heads, 128)  # of 128 * size tokens


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stages", [1, 2])
def test_families_give_the_bits_of_one(family: str, stages: int, checkpoint: Folder) -> None:
    folder = checkpoint(family)
    with running(folder, 1, skip_tokenizer_init=True, **PLENTY) as llm:
        expected = outputs(llm)
    settings = {"pipeline_parallel_size": stages, **DEALT}
    with running(folder, 2, skip_tokenizer_init=True, **settings) as llm:
        assert outputs(llm) == expected


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_are_verified_over_tokens_of_all_ranks(method: str, checkpoint: Folder) -> None:
    config = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        config["model"] = str(checkpoint("llama"))
    drafts = {"speculative_config": config}
    with running(checkpoint("llama"), 1) as llm:
        expected = outputs(llm, (140,))
    with running(checkpoint("llama"), 2, **DEALT, **drafts) as llm:
        assert outputs(llm, (140,)) == expected


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel_size": 3}, "a power of two and a multiple of"),
        ({"tensor_parallel_size": 1}, "a power of two and a multiple of"),
        ({"calculate_kv_scales": True, "kv_cache_dtype": "fp8"}, "each rank has some tokens"),
        pytest.param(
            {"runner": "pooling", "convert": "embed"},
            "which decodes nothing",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_dealt_is_refused(
    model_folder: Folder, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineCore(
            EngineConfig(
                model=str(model_folder("qwen3")), **{"tensor_parallel_size": 2, **DEALT, **options}
            )
        )


@pytest.mark.parametrize("part", ["latents", "cross"])
def test_models_that_read_other_tokens_are_refused(part: str) -> None:
    """By an index, as DeepSeek V3.2 does; an encoder's."""
    spec = replace(decoder_spec(config("LlamaForCausalLM")), **{part: Mock()})
    with pytest.raises(ConfigError, match="which each of 2 ranks needs whole"):
        ModelShard(spec, Mock(spec=RankGroup, size=2, rank=0), deals_tokens=True)


def test_a_block_has_a_tile_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model="m", tensor_parallel_size=4, decode_context_parallel_size=2)
    assert config.block_size == 512
    monkeypatch.setattr(CudaDevice, "unavailable_reason", lambda: "")
    with pytest.raises(ConfigError, match="block_size must be at most 128 on the device cuda"):
        make_device(EngineConfig(model="m", device="cuda", block_size=256))


@pytest.mark.slow
def test_blocks_come_back_from_the_ranks_host_memory(checkpoint: Folder) -> None:
    folder = checkpoint("llama")
    questions = {f"r{seed}": prompt(seed, 300 + seed) for seed in range(2)}
    expected = run(make(folder, max_model_len=512), questions)
    with tiered(folder, max_model_len=512, kv_offloading_size=0.01, **DEALT) as core:
        for _ in range(2):
            assert run(core, questions) == expected
            forget_kv_cache(core)
        assert core.scheduler.kv_connector.num_matched_tokens
