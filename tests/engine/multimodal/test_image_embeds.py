"""Pictures that come as vectors: the tokens of the pictures that they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.contract.errors import InvalidRequest
from engine.multimodal.processor import MediaProcessor
from tests.engine.multimodal.models import FAMILIES, IMAGE_TOKEN, picture

WRAPPED = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"
GRID = "image_grid_thw"


def run(llm: LLM, *images: Any, prompt: str) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [result] = llm.generate({"prompt": prompt, "multi_modal_data": {"image": list(images)}}, params)
    return list(result.outputs[0].token_ids)


def encoded(folder: Path, llm: LLM, image: Any) -> tuple[torch.Tensor, Any]:
    """The vectors that the model's encoder makes of a picture, and its grid."""
    prepared = MediaProcessor(folder).prepare(image)
    core: Any = llm.llm_engine.core
    vectors = core.executor.worker.loaded.model.encode("image", prepared.tensors)
    return vectors, prepared.tensors.get(GRID)


@pytest.mark.parametrize("name", ["llava", "llava_next", "internvl", "qwen2_vl", "qwen25_vl"])
def test_vectors_stand_for_the_picture_that_they_were_made_of(tmp_path: Path, name: str) -> None:
    FAMILIES[name](tmp_path)
    is_qwen = name.startswith("qwen")
    prompt = f"See {WRAPPED if is_qwen else IMAGE_TOKEN} here"
    llm = LLM(
        str(tmp_path), dtype="float32", num_gpu_blocks_override=128, enable_prompt_embeds=True,
        max_num_batched_tokens=16, block_size=8,
    )  # fmt: skip
    one, other = picture(1, 84, 56), picture(2, 84, 56)
    answers = [run(llm, image, prompt=prompt) for image in (one, other)]
    assert answers[0] != answers[1]
    for image, answer in zip((one, other), answers, strict=True):
        vectors, grid = encoded(tmp_path, llm, image)
        value: Any = vectors
        if is_qwen:
            value = {"image_embeds": vectors, GRID: torch.tensor(grid)}
        assert run(llm, value, prompt=prompt) == answer
    both = run(llm, value, one, prompt=prompt + prompt)
    assert both == run(llm, other, one, prompt=prompt + prompt)
    llm.llm_engine.core.check_integrity()


def test_equal_vectors_in_another_grid_are_another_picture(tmp_path: Path) -> None:
    FAMILIES["qwen2_vl"](tmp_path)
    processor, vectors = MediaProcessor(tmp_path), torch.zeros(6, 64).numpy()
    wide, tall = (processor.prepare_embeds(vectors, grid) for grid in ((1, 4, 6), (1, 6, 4)))
    assert wide.digest != tall.digest
    assert (wide.grid, tall.grid) == ((1, 2, 3), (1, 3, 2))
    for grid in ((), (1, 4, 4), (2, 2, 6), (1, 3, 8), (1, -4, -6)):
        with pytest.raises(InvalidRequest, match="image_grid_thw must be") as refused:
            processor.prepare_embeds(vectors, grid)
        assert refused.value.param == "image_embeds"


def test_vectors_are_refused_by_default_and_where_they_do_not_fit(tmp_path: Path) -> None:
    FAMILIES["llava"](tmp_path)
    closed = LLM(str(tmp_path), dtype="float32", num_gpu_blocks_override=32)
    with pytest.raises(InvalidRequest, match="need enable_prompt_embeds"):
        run(closed, torch.zeros(16, 64), prompt=IMAGE_TOKEN)
    llm = LLM(str(tmp_path), dtype="float32", num_gpu_blocks_override=32, enable_prompt_embeds=True)
    for vectors, why in (
        (torch.zeros(16, 63), r"image_embeds must be float32 \[16, 64\]"),
        (torch.full((16, 64), torch.nan), "hold NaN"),
        (torch.zeros(1, 16, 64), r"must be float \[n, hidden\]"),
        (torch.zeros(16, 64, dtype=torch.int64), r"must be float \[n, hidden\]"),
        ({"image_embeds": torch.zeros(16, 64), GRID: torch.tensor([[1, 8, 8]])}, "takes no"),
        ({"image_embeds": "AAAA"}, r"must be float \[n, hidden\]"),
        (torch.zeros(0, 64), r"must be float \[n, hidden\]"),
        ({"image_embeds": torch.zeros(16, 64), GRID: torch.tensor([torch.nan] * 3)}, "integers"),
        (None, "must be PIL images"),
        ([picture(1, 28, 28)], "must be PIL images"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            run(llm, vectors, prompt=IMAGE_TOKEN)


@pytest.mark.parametrize("name", ["gemma3", "idefics3", "pixtral", "qwen3_vl"])
def test_models_whose_prompts_say_how_a_picture_was_cut_take_no_vectors(
    tmp_path: Path, name: str
) -> None:
    FAMILIES[name](tmp_path)
    with pytest.raises(InvalidRequest, match="can't come as vectors") as refused:
        MediaProcessor(tmp_path).prepare_embeds(torch.zeros(16, 64).numpy())
    assert refused.value.param == "image_embeds"
