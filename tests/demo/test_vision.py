"""The demo model that sees: its pictures, what it learns of them, and that the engine runs it."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from demo.generator.splits import held_out
from demo.vision.pictures import KINDS, NO_PICTURE, draw
from demo.vision.train import (
    IMAGE,
    PATCH,
    SIDE,
    batches,
    export,
    make_model,
    make_processor,
    make_tokenizer,
)
from engine import LLM, SamplingParams


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
def test_words_of_one_split_are_not_in_the_other(split):
    rng = Random(3)
    for _ in range(20):
        answer = draw("word", rng, split).questions[0][1]
        assert held_out(answer.split('"')[1]) is (split == "test")


def test_answers_alone_are_learned_and_a_picture_is_its_patches(processor):
    batch, tokens = next(batches(processor, 1)), processor.tokenizer
    images = (batch["input_ids"] == tokens.convert_tokens_to_ids(IMAGE)).sum()
    assert images == len(batch["pixel_values"]) * (SIDE // PATCH) ** 2
    learned = [tokens.decode(row[row != -100]) for row in batch["labels"]]
    assert learned[0] == f"{NO_PICTURE}<|im_end|>"
    assert all(answer.endswith(".<|im_end|>") for answer in learned)


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
