"""The demo model that sees: its pictures, what it learns of them, and that the engine runs it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

import demo.vision
from demo.generator.splits import held_out
from demo.vision.evaluate import count_right
from demo.vision.pictures import KINDS, NO_PICTURE, Picture, draw
from demo.vision.train import (
    IMAGE,
    PATCH,
    SIDE,
    batches,
    export,
    letters_of_patches,
    make_model,
    make_processor,
    make_tokenizer,
)
from engine import LLM, SamplingParams
from tests.demo.pictures import red_circle

SHIPPED = Path(demo.vision.__file__).parent / "model"


@pytest.fixture(scope="module")
def processor():
    return make_processor(make_tokenizer())


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_follows_from_its_seed_and_its_answers_from_it(kind):
    first, again, other = (draw(kind, Random(seed)) for seed in (1, 1, 2))
    assert first.questions == again.questions
    assert (np.asarray(first.image) == np.asarray(again.image)).all()
    assert (
        first.image.size != other.image.size
        or (np.asarray(first.image) != np.asarray(other.image)).any()
    )


@pytest.mark.parametrize("split", ["train", "test"])
def test_letters_of_one_split_are_not_in_the_other(split):
    rng = Random(3)
    for _ in range(20):
        answer = draw("letters", rng, split).questions[0][1]
        assert held_out(answer.split('"')[1]) is (split == "test")


def test_answers_alone_are_learned_and_a_picture_is_its_patches(processor):
    batch, tokens = next(batches(processor, 1)), processor.tokenizer
    images = (batch["input_ids"] == tokens.convert_tokens_to_ids(IMAGE)).sum()
    assert images == len(batch["pixel_values"]) * (SIDE // PATCH) ** 2
    learned = [tokens.decode(row[row != -100]) for row in batch["labels"]]
    assert learned[0] == f"{NO_PICTURE}<|im_end|>"
    assert all(answer.endswith(".<|im_end|>") for answer in learned)


def test_a_patch_shows_the_letter_at_its_middle():
    image = Image.new("RGB", (80, 40))
    picture = Picture("word", image, [], [("B", (0, 0, 0.5, 1)), ("A", (0.5, 0.5, 1, 1))])
    labels = letters_of_patches(picture)
    side = SIDE // PATCH
    assert labels[:side] == [(1, 0)] * (side // 2) + [(-1, -1)] * (side // 2)
    assert labels[-side:] == [(1, 0)] * (side // 2) + [(0, 1)] * (side // 2)


def test_the_engine_runs_what_is_exported_as_transformers_does(processor, tmp_path):
    torch.manual_seed(1)
    model = make_model(processor.tokenizer).eval()
    export(tmp_path, model, processor)
    prompt = f"<|im_start|>user\n{IMAGE}What is this?<|im_end|>\n<|im_start|>assistant\n"
    image = draw("shape", Random(4)).image
    inputs = processor(images=image, text=prompt, return_tensors="pt")
    expected_output = (
        model.to(torch.bfloat16)
        .float()
        .generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)[
            0, inputs["input_ids"].shape[1] :
        ]
    )
    llm = LLM(str(tmp_path), dtype="float32", num_gpu_blocks_override=64)
    (result,) = llm.generate(
        [{"prompt": prompt, "multi_modal_data": {"image": image}}],
        SamplingParams(temperature=0, max_tokens=8, min_tokens=8),
    )
    assert list(result.outputs[0].token_ids) == expected_output.tolist()


@pytest.fixture(scope="module")
def shipped_model():
    return LlavaForConditionalGeneration.from_pretrained(SHIPPED, dtype=torch.float32).eval()


def test_the_shipped_model_is_small():
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 4 << 20


@pytest.mark.parametrize(
    ("kind", "min_right"), [("digit", 7), ("word", 8), ("letters", 5), ("shape", 9), ("chart", 9)]
)
def test_the_shipped_model_describes_held_out_pictures(shipped_model, kind, min_right):
    processor = make_processor(PreTrainedTokenizerFast.from_pretrained(SHIPPED))
    assert count_right(shipped_model, processor, kind, 10) >= min_right


def test_the_engine_answers_about_a_picture_in_a_chat_with_the_shipped_model():
    llm = LLM(str(SHIPPED), num_gpu_blocks_override=64)
    part = {"type": "image_pil", "image_pil": red_circle()}
    chat = [{"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}]
    params = SamplingParams(temperature=0, max_tokens=24)
    [result] = llm.chat(chat, params, use_tqdm=False)
    assert result.outputs[0].text == "This is a red circle."
