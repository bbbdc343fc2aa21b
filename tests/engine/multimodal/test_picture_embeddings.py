"""Vectors of pictures: CLIP and SigLIP beside `transformers`, and generating families pooled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from engine import LLM, PoolingParams
from engine.contract.errors import InvalidRequest, ModelLoadError
from tests.engine.multimodal.colqwen2 import expected_vectors, make_colqwen2
from tests.engine.multimodal.models import FAMILIES, IMAGE_TOKEN, VISION, picture, tokenizer_with

TEXT = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
TEXTS = ["a photo of a cat", "Stop"]


def dual_encoder(folder: Path, name: str) -> tuple[Any, Any, Any]:
    """A random model, its image processor, and its tokenizer."""
    tokenizer = tokenizer_with("<|end|>")
    tokenizer.eos_token, tokenizer.pad_token = "<|end|>", "<|end|>"
    eos = tokenizer.eos_token_id
    text = TEXT | {"vocab_size": len(tokenizer), "eos_token_id": eos, "pad_token_id": eos}
    size = {"height": 28, "width": 28}
    if name == "clip":
        config = tf.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=40)
        images = tf.CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False)
        kind: Any = tf.CLIPModel
    else:
        text |= {"projection_size": VISION["hidden_size"]}
        config = tf.SiglipConfig(text_config=text, vision_config=VISION)
        images = tf.SiglipImageProcessorPil(size=size)
        kind = tf.SiglipModel
    torch.manual_seed(5)
    model = kind(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases are all 1 or 0 at first
            parameter.data += torch.randn(parameter.shape) * 0.2
    for part in (model, images, tokenizer):
        part.save_pretrained(folder)
    return model, images, tokenizer


def normalized(values: Any) -> torch.Tensor:
    values = getattr(values, "pooler_output", values)
    return torch.nn.functional.normalize(values, dim=-1)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_vectors_of_pictures_and_texts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model, images, tokenizer = dual_encoder(tmp_path, name)
    pictures = [picture(1, 60, 40), picture(2, 30, 70)]
    ids = [
        [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        for text in TEXTS
    ]
    with torch.inference_mode():
        pixels = images(pictures, return_tensors="pt")["pixel_values"]
        expected_rows = [*normalized(model.get_image_features(pixel_values=pixels))]
        for row in ids:
            padding = 0 if name == "clip" else 64 - len(row)
            padded = torch.tensor([row + [tokenizer.eos_token_id] * padding])
            expected_rows.append(normalized(model.get_text_features(input_ids=padded))[0])
    llm = LLM(str(tmp_path), dtype="float32")
    prompts: list[Any] = [{"prompt": "", "multi_modal_data": {"image": one}} for one in pictures]
    prompts += [{"prompt_token_ids": row} for row in ids]
    for _ in range(2):  # the second time pictures come from the cache
        vectors = torch.tensor([result.outputs.embedding for result in llm.embed(prompts)])
        assert torch.allclose(vectors, torch.stack(expected_rows), atol=2e-5)
    stats = llm.core.snapshot()
    assert (stats.mm_cache_hits_total, stats.mm_cache_queries_total) == (2, 4)
    one_by_one = [llm.embed(prompt)[0].outputs.embedding for prompt in prompts]
    assert one_by_one == vectors.tolist()
    raw = llm.embed(prompts[0], PoolingParams(use_activation=False))[0].outputs.embedding
    assert torch.tensor(raw).norm() != pytest.approx(1.0, abs=1e-3)
    for prompt in (
        {"prompt": "both", "multi_modal_data": {"image": pictures[0]}},
        {"prompt": "", "multi_modal_data": {"image": pictures}},
    ):
        with pytest.raises(InvalidRequest, match="a text or one image"):
            llm.embed(prompt)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_families_that_generate_give_vectors_of_prompts_with_pictures(
    tmp_path: Path, name: str
) -> None:
    model, processor = FAMILIES[name](tmp_path)
    image = picture(1, 60, 40)
    placeholder = IMAGE_TOKEN if name == "llava" else f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"
    prompt = f"See {placeholder} here"
    inputs = processor(images=[image], text=prompt, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    with torch.inference_mode():
        hidden = model.model(**inputs).last_hidden_state[0]
    llm = LLM(str(tmp_path), dtype="float32", runner="pooling", num_gpu_blocks_override=64)
    request: Any = {"prompt": prompt, "multi_modal_data": {"image": image}}
    vector = torch.tensor(llm.embed(request)[0].outputs.embedding)
    assert torch.allclose(vector, normalized(hidden[-1]), atol=2e-4)
    by_token = llm.encode(request, pooling_task="token_embed")[0].outputs.data
    assert torch.allclose(by_token, normalized(hidden), atol=2e-4)
    other = {"prompt": prompt, "multi_modal_data": {"image": picture(2, 60, 40)}}
    assert not torch.allclose(
        torch.tensor(llm.embed(other)[0].outputs.embedding), vector, atol=0.01
    )


def test_colqwen2_over_another_tower_is_refused(tmp_path: Path) -> None:
    make_colqwen2(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vlm_config"]["model_type"] = "qwen2_5_vl"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="'qwen2_vl'; got 'qwen2_5_vl'") as refused:
        LLM(str(tmp_path), runner="pooling")
    assert refused.value.param == "vlm_config"


def test_colqwen2_gives_each_token_of_a_page_or_a_question_its_vector(tmp_path: Path) -> None:
    model, processor = make_colqwen2(tmp_path)
    images = [picture(1, 60, 40), picture(2, 30, 90)]
    expected_rows = [expected_vectors(model, processor, images=[image]) for image in images]
    expected_rows.append(expected_vectors(model, processor, text=["a cat?"]))
    query = f"Query: a cat?{'<|endoftext|>' * 10}\n"
    prompts: list[Any] = [
        {"prompt": processor.visual_prompt_prefix, "multi_modal_data": {"image": image}}
        for image in images
    ] + [query]
    options: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64}
    for budget in (512, 16):
        llm = LLM(str(tmp_path), max_num_batched_tokens=budget, **options)
        for _ in range(2):  # the second time pictures come from the cache
            results = llm.encode(prompts, pooling_task="token_embed")
            for result, rows in zip(results, expected_rows, strict=True):
                assert result.outputs.data.shape == rows.shape == (len(rows), 24)
                assert torch.allclose(result.outputs.data, rows, atol=2e-4)
        [isolated] = llm.encode(prompts[:1], pooling_task="token_embed")
        assert torch.allclose(isolated.outputs.data, expected_rows[0], atol=2e-4)
    with pytest.raises(InvalidRequest, match="token_embed"):
        llm.embed(query)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_rounded_activations_keep_the_directions_of_vectors(tmp_path: Path, name: str) -> None:
    dual_encoder(tmp_path, name)
    image = {"prompt": "", "multi_modal_data": {"image": picture(1, 60, 40)}}
    prompts: list[Any] = ["a cat", image]
    vectors = []
    for rounds in (False, True):
        llm = LLM(str(tmp_path), dtype="bfloat16", round_activations=rounds)
        vectors.append(torch.tensor([result.outputs.embedding for result in llm.embed(prompts)]))
    assert (vectors[0] * vectors[1]).sum(dim=1).min() > 0.999
