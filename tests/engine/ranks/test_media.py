"""Models that hear, shared by ranks, and models that see, in stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from tests.engine.multimodal.bridged_models import vip_llava
from tests.engine.multimodal.models import FAMILIES, IMAGE_TOKEN, picture
from tests.engine.multimodal.test_vision_families import generate_tokens, picture_prompts
from tests.engine.speech.models import START, make_whisper, sound

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("compiler")]


def test_two_ranks_hear_what_one_hears(tmp_path: Path) -> None:
    make_whisper(tmp_path)
    prompts = [
        {"prompt_token_ids": [START, *range(20, 20 + extra)], "multi_modal_data": {"audio": wave}}
        for extra, wave in ((0, sound(1)), (25, sound(2, 0.4)), (3, sound(1)))
    ]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    reported = []
    for size in (1, 2):
        llm = LLM(
            str(tmp_path),
            skip_tokenizer_init=True,
            dtype="float32",
            num_gpu_blocks_override=256,
            num_threads=2,
            tensor_parallel_size=size,
        )
        try:
            outputs = [result.outputs[0] for result in llm.generate(prompts, params)]
            reported.append([(output.token_ids, output.logprobs) for output in outputs])
            assert llm.llm_engine.vllm_config.model_config.max_model_len
        finally:
            llm.llm_engine.core.shutdown()
    assert reported[0] == reported[1]


@pytest.mark.slow
def test_two_ranks_of_the_bridge_see_what_one_sees(tmp_path: Path) -> None:
    vip_llava(tmp_path)
    prompts = [
        {
            "prompt": f"See {IMAGE_TOKEN} here.",
            "multi_modal_data": {"image": [picture(number, 60, 40)]},
        }
        for number in (1, 2)
    ]
    tokens = []
    for size in (1, 2):
        llm = LLM(
            str(tmp_path),
            dtype="float32",
            model_impl="transformers",
            num_gpu_blocks_override=256,
            num_threads=2,
            tensor_parallel_size=size,
        )
        try:
            tokens.append(generate_tokens(llm, prompts))
        finally:
            llm.llm_engine.core.shutdown()
    assert tokens[0] == tokens[1]


#: Positions in planes, and sums in several layers.
QUICK = ("qwen3_vl",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in sorted(FAMILIES)
    ],
)
def test_two_stages_see_what_one_sees(name: str, tmp_path: Path) -> None:
    FAMILIES[name](tmp_path)
    tokens = []
    for num_stages in (1, 2):
        llm = LLM(
            str(tmp_path),
            dtype="float32",
            num_gpu_blocks_override=256,
            max_num_batched_tokens=64,
            num_threads=2,
            pipeline_parallel_size=num_stages,
        )
        try:
            # With pictures, and with what is cached of them.
            tokens.append([generate_tokens(llm, picture_prompts(name)) for _ in range(2)])
        finally:
            llm.llm_engine.core.shutdown()
    assert tokens[0] == tokens[1]
