"""Models that see through the Transformers bridge give `transformers`' tokens, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from engine.contract.errors import ModelLoadError
from engine.transformers_backend.vision import TransformersVisionModel
from tests.engine.multimodal.bridged_models import (
    deepseek_vl,
    idefics2,
    paligemma,
    vip_llava,
)
from tests.engine.multimodal.models import FAMILIES, IMAGE_TOKEN, expected, picture
from tests.engine.multimodal.test_vision_families import NUM_TOKENS, generate_tokens

NATIVE = ("llava", "idefics3", "internvl", "mistral3", "pixtral", "smolvlm")
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 256}


@pytest.mark.parametrize(
    "make",
    [
        vip_llava,
        deepseek_vl,
        FAMILIES["llava_next"],
        *(pytest.param(FAMILIES[name], marks=pytest.mark.slow) for name in NATIVE),
    ],
)
def test_tokens_equal_those_of_transformers_together_cached_and_cut(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    model, processor = make(tmp_path)
    one, wide = picture(1, 60, 40), picture(2, 100, 30)
    prompts = [
        {"prompt": "No picture at all", "multi_modal_data": {"image": []}},
        {"prompt": f"See {IMAGE_TOKEN} here.", "multi_modal_data": {"image": [one]}},
        {"prompt": f"{IMAGE_TOKEN} and {IMAGE_TOKEN}", "multi_modal_data": {"image": [wide, one]}},
    ]
    expected_tokens = [
        expected(model, processor, p["prompt"], p["multi_modal_data"]["image"], NUM_TOKENS)
        for p in prompts
    ]
    for budget in (512, 16):
        llm = LLM(
            str(tmp_path), model_impl="transformers", max_num_batched_tokens=budget, **OPTIONS
        )
        assert generate_tokens(llm, prompts) == expected_tokens
        assert generate_tokens(llm, prompts) == expected_tokens
        assert llm.llm_engine.core.scheduler.kv.num_hit_tokens


def test_the_trial_at_load_takes_three_steps_however_many_tokens_a_picture_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAMILIES["llava_next"](tmp_path)
    forward, steps = TransformersVisionModel.forward, []

    def counted(self: Any, token_ids: Any, context: Any) -> Any:
        if context.encoder_embeds is not None:
            steps.append(len(token_ids))
        return forward(self, token_ids, context)

    monkeypatch.setattr(TransformersVisionModel, "forward", counted)
    LLM(str(tmp_path), model_impl="transformers", **OPTIONS)
    assert steps == [80, 41, 39]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (paligemma, "PaliGemma.* more of a picture than vectors in the place of its tokens"),
        (idefics2, "Idefics2Processor doesn't say which tokens stand for a picture"),
        *(
            pytest.param(FAMILIES[name], "more of a picture than vectors", marks=pytest.mark.slow)
            for name in ("gemma3", "qwen2_vl", "qwen25_vl", "qwen3_vl")
        ),
    ],
)
def test_models_to_which_a_picture_is_more_are_refused_by_name(
    make: Callable[[Path], Any], reason: str, tmp_path: Path
) -> None:
    make(tmp_path)
    with pytest.raises(ModelLoadError, match=reason):
        LLM(str(tmp_path), model_impl="transformers", **OPTIONS)
