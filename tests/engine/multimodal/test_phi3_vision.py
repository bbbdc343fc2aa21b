"""Phi-3-vision's pictures: tiles as torch cuts them, numbered placeholders, its own option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams
from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.models.vision.registry import find_vision_family
from engine.multimodal.processor import MediaProcessor
from tests.engine.multimodal.models import expected, phi3_vision, picture

NUM_TOKENS = 8


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Folder, model and processor."""
    folder = tmp_path_factory.mktemp("phi3_vision")
    return (folder, *phi3_vision(folder))


@pytest.mark.parametrize(
    ("width", "height", "num_crops"),
    [(60, 40, 4), (30, 90, 4), (300, 20, 4), (28, 28, 1), (75, 61, 9), (17, 120, 16)],
)
def test_tiles_are_those_of_torch(
    phi3: tuple[Path, Any, Any], width: int, height: int, num_crops: int
) -> None:
    folder, _, processor = phi3
    image = picture(3, width, height)
    prepared = MediaProcessor(folder).prepare(image, {"num_crops": num_crops})
    tiles, rows, columns = processor.prepare(image, num_crops)
    assert prepared.tensors["image_sizes"].tolist() == [[28 * rows, 28 * columns]]
    pixels = torch.from_numpy(np.array(prepared.tensors["pixel_values"][0]))
    assert torch.allclose(pixels, tiles, atol=1e-5)
    assert prepared.num_vectors == processor.num_tokens(rows, columns)


def test_numbered_placeholders_stand_for_pictures_in_order(phi3: tuple[Path, Any, Any]) -> None:
    folder, model, processor = phi3
    pictures = [picture(1, 60, 40), picture(2, 30, 90)]
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=64)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompt = "<|image_1|>\n<|image_2|>\nWhat?"
    request: Any = {"prompt": prompt, "multi_modal_data": {"image": pictures}}
    [result] = llm.generate(request, params)
    assert list(result.outputs[0].token_ids) == expected(
        model, processor, prompt, pictures, NUM_TOKENS
    )
    for invalid in ("<|image_2|><|image_1|>", "<|image_1|><|image_1|>", "<|image_0|><|image_1|>"):
        with pytest.raises(InvalidRequest, match="image_1") as refused:
            llm.generate({"prompt": invalid, "multi_modal_data": {"image": pictures}}, params)
        assert refused.value.param == "prompt"


def test_what_clients_write_in_a_chat_is_text(phi3: tuple[Path, Any, Any]) -> None:
    folder, _, _ = phi3
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=64)
    token = MediaProcessor(folder).image_token_id
    params = SamplingParams(temperature=0, max_tokens=1)
    image = picture(1, 60, 40)
    part = {"type": "image_pil", "image_pil": image}
    num_vectors = MediaProcessor(folder).prepare(image).num_vectors
    text = {"type": "text", "text": "<|image|> or <|image_1|>?"}
    chats: Any = [
        ([{"role": "user", "content": [text, part]}], num_vectors),
        ([{"role": "user", "content": [text]}], 0),
    ]
    for chat, count in chats:
        [result] = llm.chat(chat, params, use_tqdm=False)
        assert list(result.prompt_token_ids).count(token) == count


@pytest.mark.parametrize("num_crops", [0, -1, True, "4", 1 << 40])
def test_num_crops_is_bounded_by_its_field(phi3: tuple[Path, Any, Any], num_crops: Any) -> None:
    with pytest.raises(InvalidRequest, match="num_crops must be") as refused:
        MediaProcessor(phi3[0]).prepare(picture(1, 60, 40), {"num_crops": num_crops})
    assert refused.value.param == "mm_processor_kwargs"


def test_another_connector_is_refused_by_name() -> None:
    config = {
        "architectures": ["Phi3VForCausalLM"],
        "model_type": "phi3_v",
        "embd_layer": {"hd_transform_order": "glb_sub"},
    }
    with pytest.raises(ModelLoadError, match="hd_transform_order") as refused:
        find_vision_family(config)
    assert refused.value.param == "embd_layer"
