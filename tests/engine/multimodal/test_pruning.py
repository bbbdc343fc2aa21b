"""Pruned videos and pictures: the tokens of `transformers` without those that say least."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError
from engine.multimodal.processor import MediaProcessor, PreparedMedia
from engine.multimodal.pruning import RETAINED, retained_cells
from engine.multimodal.video_files import Video
from tests.engine.multimodal.models import IMAGE_TOKEN, picture
from tests.engine.multimodal.test_videos import VIDEO_TOKEN, WRAPPED, qwen_patches

NUM_TOKENS = 8
#: Of three steps in time with 2 x 3 squares each: the first, and two that changed.
RETAINED_SQUARES = [0, 1, 2, 3, 4, 5, 7, 17]
VIDEO_RATE, TIMES = 0.55, [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]


def still_frames() -> list[Image.Image]:
    """Six frames of 42 x 28 pixels, in which a square of 14 changes from the third on, and another
    from the fifth on.
    """
    pixels = np.stack([np.asarray(picture(1, 42, 28))] * 6)
    pixels[2:, :14, 14:28] = np.asarray(picture(2, 14, 14))
    pixels[4:, 14:, 28:] = np.asarray(picture(3, 14, 14))
    return [Image.fromarray(frame) for frame in pixels]


def flat_picture() -> Image.Image:
    """28 x 28 pixels in squares of 7, of which all but three are alike."""
    pixels = np.full((28, 28, 3), 90, dtype=np.uint8)
    pixels[7:14, 14:21] = np.asarray(picture(4, 7, 7))
    pixels[21:28, 0:7] = np.asarray(picture(5, 7, 7))
    pixels[0:7, 21:28] = 255
    return Image.fromarray(pixels)


def run(llm: LLM, prompts: list[dict[str, Any]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]


@torch.inference_mode()
def expected_video(name: str, model: Any, processor: Any, prompt: str) -> list[int]:
    """What `transformers` generates of `still_frames`, without the vectors of squares that stay."""
    patches, grid = qwen_patches(still_frames(), processor.images)
    text = VIDEO_TOKEN * 18
    options: dict[str, Any] = {}
    if name == "qwen25_vl":
        options = {"second_per_grid_ts": torch.tensor([1.0])}
    if name == "qwen3_vl":
        pads = f"<|vision_start|>{VIDEO_TOKEN * 6}<|vision_end|>"
        text = "".join(f"<{time:.1f} seconds>{pads}" for time in (0.25, 1.25, 2.25))
        prompt = prompt.replace(WRAPPED, VIDEO_TOKEN)
    ids = processor.tokenizer(prompt.replace(VIDEO_TOKEN, text), return_tensors="pt")["input_ids"]
    is_video = ids[0] == processor.tokenizer.convert_tokens_to_ids(VIDEO_TOKEN)
    positions, _ = model.model.get_rope_index(
        ids, video_grid_thw=grid, mm_token_type_ids=is_video[None].int() * 2, **options
    )
    outputs = model.model.get_video_features(patches, grid)
    embeds = model.get_input_embeddings()(ids)
    embeds[0, is_video] = torch.cat(tuple(outputs.pooler_output))
    retained = torch.zeros(18, dtype=torch.bool)
    retained[RETAINED_SQUARES] = True
    stays = torch.ones_like(is_video)
    stays[is_video] = retained
    embeds, positions, seen = embeds[:, stays], positions[:, :, stays], is_video[stays][None]
    levels = getattr(outputs, "deepstack_features", None) or ()
    deep = [torch.cat(tuple(level))[retained] for level in levels]
    tokens: list[int] = []
    for _ in range(NUM_TOKENS):
        extra = {"visual_pos_masks": seen, "deepstack_visual_embeds": deep} if deep else {}
        hidden = model.model.language_model(
            inputs_embeds=embeds, position_ids=positions, use_cache=False, **extra
        )[0]
        tokens.append(int(model.lm_head(hidden[0, -1]).argmax()))
        embeds = torch.cat((embeds, model.get_input_embeddings()(torch.tensor([tokens[-1:]]))), 1)
        positions = torch.cat((positions, (positions.max() + 1).expand(3, 1, 1)), dim=2)
        seen = torch.cat((seen, torch.tensor([[False]])), dim=1)
    return tokens


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen25_vl", "qwen3_vl"])
def test_pruned_videos_keep_their_places_and_equal_transformers(
    family: Callable[[str], tuple[Path, Any, Any]], name: str
) -> None:
    folder, model, processor = family(name)
    prompt = f"What happens {WRAPPED} here?"
    tokens = expected_video(name, model, processor, prompt)
    video = {"prompt": prompt, "multi_modal_data": {"video": (still_frames(), {"fps": 2})}}
    other = {"prompt": prompt, "multi_modal_data": {"video": ([picture(9, 42, 28)], {"fps": 2})}}
    options: Any = {
        "dtype": "float32", "num_gpu_blocks_override": 128, "video_pruning_rate": VIDEO_RATE
    }  # fmt: skip
    llm = LLM(str(folder), **options)
    assert run(llm, [video, other])[0] == tokens
    assert run(llm, [video]) == [tokens]  # from the cache
    cut = LLM(str(folder), **options, max_num_batched_tokens=16, block_size=8)
    assert run(cut, [other, video])[1] == tokens
    core = cut.llm_engine.core
    core.preempt_all()
    assert run(cut, [video]) == [tokens]
    core.check_integrity()


@torch.inference_mode()
def test_pruned_pictures_equal_transformers(
    family: Callable[[str], tuple[Path, Any, Any]],
) -> None:
    folder, model, processor = family("llava")
    prompt = f"See {IMAGE_TOKEN} here."
    prepared = MediaProcessor(folder, {"image": 0.5}).prepare(flat_picture())
    retained = np.asarray(prepared.tensors[RETAINED]).tolist()
    # The corner, the three that differ, and their neighbours, then the first of those alike.
    assert {0, 3, 6, 12} < set(retained)
    assert len(retained) == 8
    inputs = processor(images=[flat_picture()], text=prompt, return_tensors="pt")
    ids = inputs["input_ids"]
    vectors = model.model.get_image_features(inputs["pixel_values"]).pooler_output
    embeds = model.get_input_embeddings()(ids)
    is_image = ids[0] == model.config.image_token_index
    embeds[0, is_image] = torch.cat(tuple(vectors))
    stays = ~is_image
    stays[is_image.nonzero()[:, 0][retained]] = True
    tokens = model.generate(
        inputs_embeds=embeds[:, stays], max_new_tokens=NUM_TOKENS, do_sample=False
    )[0].tolist()
    llm = LLM(
        str(folder), dtype="float32", num_gpu_blocks_override=64, image_pruning_rate=0.5,
        max_num_batched_tokens=8, block_size=8,
    )  # fmt: skip
    asked = {"prompt": prompt, "multi_modal_data": {"image": flat_picture()}}
    assert run(llm, [asked]) == [tokens]
    assert run(llm, [asked]) == [tokens]


def test_of_frames_that_change_nothing_a_square_is_left(
    family: Callable[[str], tuple[Path, Any, Any]],
) -> None:
    processor = MediaProcessor(family("qwen3_vl")[0], {"video": VIDEO_RATE})
    frames = still_frames()
    frames[2:4] = frames[:2]
    prepared = processor.prepare_video(Video(frames, TIMES))
    cells = [
        np.flatnonzero(frame).tolist() for frame in retained_cells(prepared.retained, prepared.grid)
    ]
    assert [len(frame) for frame in cells] == [6, 1, 1]
    assert prepared.replacement.count("seconds>") == 3
    assert "<1.2 seconds><|vision_start|><|vision_end|>" not in prepared.replacement


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("idefics3", "image"), ("internvl", "image"), ("internvl", "video"), ("llava", "image"),
        ("qwen2_vl", "image"), ("qwen2_vl", "video"),
    ],
)  # fmt: skip
def test_what_is_pruned_is_another_item_than_the_whole(
    family: Callable[[str], tuple[Path, Any, Any]], name: str, kind: str
) -> None:
    folder = family(name)[0]

    def prepare(**rates: float) -> PreparedMedia:
        processor = MediaProcessor(folder, rates)
        if kind == "video":
            return processor.prepare_video(Video(still_frames(), TIMES))
        return processor.prepare(picture(1, 84, 56))

    full, same = prepare(), prepare(**{"video" if kind == "image" else "image": 0.9})
    assert full.digest == same.digest
    half, quarter = prepare(**{kind: 0.5}), prepare(**{kind: 0.25})
    assert len({full.digest, half.digest, quarter.digest}) == 3
    assert half.num_vectors == full.num_vectors // 2
    assert half.num_vectors < quarter.num_vectors < full.num_vectors
    placeholder = half.placeholder if half.kind == "image" else "<video>"
    media = picture(1, 84, 56) if kind == "image" else (still_frames(), {"fps": 2})
    if name == "qwen2_vl":
        placeholder = f"<|vision_start|>{half.placeholder}<|vision_end|>"
    llm = LLM(
        str(folder), dtype="float32", num_gpu_blocks_override=64, **{f"{kind}_pruning_rate": 0.5}
    )
    prompt = {"prompt": placeholder, "multi_modal_data": {kind: media}}
    [result] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))
    tokens = list(result.prompt_token_ids or ())
    assert tokens.count(half.token_id) == half.num_vectors


def test_models_without_a_token_for_each_square_refuse_to_be_pruned(
    family: Callable[[str], tuple[Path, Any, Any]],
) -> None:
    for name, field in (
        ("llava_next", "image_pruning_rate"), ("gemma3", "image_pruning_rate"),
        ("llava", "video_pruning_rate"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="square of pixels") as refused:
            LLM(str(family(name)[0]), dtype="float32", **{field: 0.5})
        assert refused.value.param == field
    with pytest.raises(ConfigError) as refused:
        LLM(str(family("llava")[0]), image_pruning_rate=1.0)
    assert refused.value.param == "image_pruning_rate"


def test_a_class_token_among_the_vectors_is_refused_at_load(
    family: Callable[[str], tuple[Path, Any, Any]], tmp_path: Path
) -> None:
    """Pictures whose vectors aren't all of squares would each be refused."""
    folder = shutil.copytree(family("llava")[0], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["vision_feature_select_strategy"] = "full"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="no token for each square") as refused:
        LLM(str(folder), num_gpu_blocks_override=16, image_pruning_rate=0.5)
    assert refused.value.param == "image_pruning_rate"
