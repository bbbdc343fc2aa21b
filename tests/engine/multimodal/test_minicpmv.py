"""MiniCPM-V's pictures: slices as its own code cuts them, numbered in the prompt."""

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
from tests.engine.multimodal.minicpmv import PATCH
from tests.engine.multimodal.models import expected, minicpmv, picture

NUM_TOKENS = 8


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Folder, model and processor."""
    folder = tmp_path_factory.mktemp("minicpmv")
    return (folder, *minicpmv(folder))


@pytest.mark.parametrize(
    ("width", "height"), [(20, 14), (28, 28), (60, 40), (30, 90), (300, 20), (75, 61), (17, 120)]
)
def test_slices_are_those_of_its_own_code(
    mini: tuple[Path, Any, Any], width: int, height: int
) -> None:
    folder, _, processor = mini
    prepared = MediaProcessor(folder).prepare(picture(3, width, height))
    slices, columns, rows = processor.slices(picture(3, width, height))
    sizes = [[part.shape[1] // PATCH, part.shape[2] // PATCH] for part in slices]
    assert prepared.tensors["tgt_sizes"].tolist() == sizes
    patches = [part.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH) for part in slices]
    strips = [part.permute(0, 3, 1, 2, 4).reshape(3, PATCH, -1) for part in patches]
    pixels = torch.from_numpy(np.array(prepared.tensors["pixel_values"]))
    assert torch.allclose(pixels, torch.cat(strips, dim=2), atol=1e-6)
    assert prepared.replacement.count("<slice>") == columns * rows


def test_pictures_are_numbered_in_each_prompt(mini: tuple[Path, Any, Any]) -> None:
    folder, model, processor = mini
    first, second = picture(1, 60, 40), picture(2, 30, 90)
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=64)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for pictures in ([first, second], [second, first]):
        prompt = "(<image>./</image>)\n(<image>./</image>)\nWhat?"
        request: Any = {"prompt": prompt, "multi_modal_data": {"image": pictures}}
        [result] = llm.generate(request, params)
        with_tokens = prompt.replace("(<image>./</image>)", "<image>")
        token_ids = expected(model, processor, with_tokens, pictures, NUM_TOKENS)
        assert list(result.outputs[0].token_ids) == token_ids
        # As a gateway expands it, from tokens.
        tokenizer = llm.get_tokenizer()
        by_tokens: Any = request | {"prompt_token_ids": tokenizer.encode(with_tokens)}
        del by_tokens["prompt"]
        [other] = llm.generate(by_tokens, params)
        assert other.prompt_token_ids == result.prompt_token_ids
        assert list(other.outputs[0].token_ids) == token_ids


@pytest.mark.parametrize("limit", [0, True, "4", 65, 1 << 40])
def test_max_slice_nums_is_bounded_by_its_field(mini: tuple[Path, Any, Any], limit: Any) -> None:
    with pytest.raises(InvalidRequest, match="max_slice_nums must be") as refused:
        MediaProcessor(mini[0]).prepare(picture(1, 60, 40), {"max_slice_nums": limit})
    assert refused.value.param == "mm_processor_kwargs"
    uncut = MediaProcessor(mini[0]).prepare(picture(1, 60, 40), {"max_slice_nums": 1})
    assert len(uncut.tensors["tgt_sizes"]) == 1


def test_other_versions_are_refused_by_name() -> None:
    config = {"architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": 2.5}
    with pytest.raises(ModelLoadError, match=r"2\.6") as refused:
        find_vision_family(config)
    assert refused.value.param == "version"
