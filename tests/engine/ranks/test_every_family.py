"""Ranks and stages give one rank's tokens and log probabilities, whatever the family has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError
from tests.engine.families.conftest import NATIVE, checkpoint
from tests.survey.tiny import prompts

__all__ = ["checkpoint"]

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("compiler")]

#: Experts; latents; states and gates; numbers of KV heads by layer; a norm over all heads; experts
#: with biases and interleaved rows; one fused weight; ALiBi.
QUICK = ("mixtral", "deepseek_v3", "qwen3_next", "decilm", "olmo2", "gpt_oss", "phi3", "bloom")
#: Latents; states; a norm of embeddings and ALiBi.
QUICK_STAGES = ("deepseek_v3", "qwen3_next", "bloom")
#: Experts with a shared one and groups; with biases, packed all together.
QUICK_EXPERTS = ("deepseek_v3", "gpt_oss")
#: Gates are chosen among all of an MLP.
ONE_RANK = ("gemma3n",)
#: All layers read the embeddings.
ONE_STAGE = ("zamba2", "zamba2-plain")
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)


def outputs(
    folder: Path, size: int, num_stages: int = 1, *, expert_parallel: bool = False
) -> list[tuple[list[int], list[dict[int, float]]]]:
    llm = LLM(
        model=str(folder), tensor_parallel_size=size, pipeline_parallel_size=num_stages,
        enable_expert_parallel=expert_parallel,
        num_threads=2, num_gpu_blocks_override=128, skip_tokenizer_init=True,
    )  # fmt: skip
    try:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts((1, 47, 16, 64, 90))]
        results = llm.generate(inputs, PARAMS, use_tqdm=False)
    finally:
        llm.core.shutdown()
    return [
        (
            list(result.outputs[0].token_ids),
            [
                {token: entry.logprob for token, entry in row.items()}
                for row in result.outputs[0].logprobs or []
            ],
        )
        for result in results
    ]


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_give_the_bits_of_one(name: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(name)
    expected = outputs(folder, 1)
    assert outputs(folder, 2) == expected
    if name in QUICK_STAGES:
        assert outputs(folder, 1, 2) == expected
    if name in QUICK_EXPERTS:
        assert outputs(folder, 2, expert_parallel=True) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NATIVE))
def test_any_number_of_ranks_gives_the_bits_of_one(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint(name)
    if name in ONE_RANK:
        with pytest.raises(ConfigError, match="all its gates"):
            outputs(folder, 2)
        return
    expected = outputs(folder, 1)
    assert outputs(folder, 2) == expected
    assert outputs(folder, 3) == expected
    assert outputs(folder, 3, expert_parallel=True) == expected
    if name in ONE_STAGE:
        with pytest.raises(ConfigError, match="read the embeddings"):
            outputs(folder, 1, 2)
        return
    assert outputs(folder, 1, 2) == expected
    assert outputs(folder, 2, 2) == expected
