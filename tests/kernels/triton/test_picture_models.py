"""Models that see and hear, on the Triton kernels in the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.models.vision.family import VisionDecoder
from kernels.triton import TritonKernels
from tests.engine.multimodal.models import FAMILIES, IMAGE_TOKEN, PLACEHOLDERS, expected, picture
from tests.engine.speech.models import sound
from tests.engine.speech.test_audio_families import AUDIO, expected_tokens, make_omni

OTHER_FAMILIES = sorted(set(FAMILIES) - {"gemma3", "llava", "qwen2_vl"})
NAMES = (
    "gemma3",
    "llava",
    "qwen2_vl",
    *(pytest.param(n, marks=pytest.mark.slow) for n in OTHER_FAMILIES),
)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_those_of_transformers(name: str, forced: None, tmp_path: Path) -> None:
    """A prompt of one picture, then the same one from the prefix cache."""
    model, processor = FAMILIES[name](tmp_path)
    image, one = PLACEHOLDERS.get(name, IMAGE_TOKEN), picture(1, 60, 40)
    llm = LLM(
        str(tmp_path), device="cpu", dtype="float32", num_gpu_blocks_override=64, block_size=4
    )
    loaded = llm.core.executor.worker.loaded.model
    assert isinstance(loaded, VisionDecoder)
    assert isinstance(loaded.ops, TritonKernels)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    prompt = {"prompt": f"{image} it", "multi_modal_data": {"image": one}}
    for _ in range(2):
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == expected(
            model, processor, prompt["prompt"], [one], 2
        )
    assert llm.core.snapshot().prefix_cache_hits_total


def test_tokens_about_sound_equal_those_of_transformers(forced: None, tmp_path: Path) -> None:
    reference, tokenizer = make_omni(tmp_path)
    llm = LLM(
        str(tmp_path), device="cpu", dtype="float32", num_gpu_blocks_override=64, block_size=4
    )
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    text, clips = f"{AUDIO} it", [sound(1, 0.31)]
    prompt = {"prompt": text, "multi_modal_data": {"audio": clips}}
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    expected_ids = expected_tokens(reference, tokenizer, text, clips)[:2]
    assert list(output.outputs[0].token_ids) == expected_ids
