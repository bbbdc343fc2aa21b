"""Models that see and hear, on a device that is waited for only for tokens of the step before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.contract.engine_config import EngineConfig
from engine.devices.offload import iter_tensors
from engine.executor.sleep import model_tensors
from engine.multimodal.audio import FEATURES
from engine.scheduler.encoder_cache import encoder_capacity
from engine.worker.gpu.encoder_memory import fill_encoder_cache
from engine.worker.gpu.setup import profile
from tests.engine.cuda.fake_device import FakeDevice, on_device
from tests.engine.cuda.test_memory import FakeMeter
from tests.engine.multimodal.models import FAMILIES, IMAGE_TOKEN, PLACEHOLDERS, expected, picture
from tests.engine.speech.test_audio_families import FAMILIES as HEARING_FAMILIES
from tests.engine.speech.test_audio_families import PROMPTS as CLIPS
from tests.engine.speech.test_audio_families import expected_tokens, make_voxtral

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


def make_prompts(name: str) -> list[dict[str, Any]]:
    """None, one and several pictures."""
    image = PLACEHOLDERS.get(name, IMAGE_TOKEN)
    one, wide = picture(1, 60, 40), picture(2, 100, 30)
    return [
        {"prompt": "No picture at all", "multi_modal_data": {"image": []}},
        {"prompt": f"See {image} here.", "multi_modal_data": {"image": [one]}},
        {"prompt": f"{image} and {image}", "multi_modal_data": {"image": [wide, one]}},
    ]


def encoded_on_device(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors are the device's, as they would be on one."""
    model: Any = llm.core.executor.worker.loaded.model
    encode: Callable[..., torch.Tensor] = model.encode
    monkeypatch.setattr(model, "encode", lambda *args: on_device(encode(*args)))


@pytest.mark.parametrize("name", ["gemma3", "llava", "qwen2_vl", "qwen3_vl"])
def test_greedy_tokens_equal_those_of_transformers(
    name: str, device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together, so that prompts in chunks and decodes share steps; then from the prefix cache."""
    model, processor = FAMILIES[name](tmp_path)
    prompts = make_prompts(name)
    tokens = [
        expected(model, processor, entry["prompt"], entry["multi_modal_data"]["image"], NUM_TOKENS)
        for entry in prompts
    ]
    llm = device.engine(
        tmp_path, max_num_batched_tokens=32, max_model_len=256, num_gpu_blocks_override=128
    )
    encoded_on_device(llm, monkeypatch)
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == tokens
        llm.core.check_integrity()


@pytest.mark.parametrize("name", ["omni", "voxtral"])
def test_tokens_about_sound_equal_those_of_transformers(
    name: str, device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, tokenizer = HEARING_FAMILIES[name](tmp_path)
    tokens = [expected_tokens(reference, tokenizer, *prompt)[:NUM_TOKENS] for prompt in CLIPS]
    llm = device.engine(
        tmp_path, max_num_batched_tokens=32, max_model_len=256, num_gpu_blocks_override=128
    )
    encoded_on_device(llm, monkeypatch)
    prompts = [{"prompt": text, "multi_modal_data": {"audio": clips}} for text, clips in CLIPS]
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == tokens
        llm.core.check_integrity()


def test_the_longest_sound_of_the_cache_is_measured(device: FakeDevice, tmp_path: Path) -> None:
    """Of windows of 100 frames, 10 vectors each."""
    make_voxtral(tmp_path)
    loaded: Any = device.engine(tmp_path).core.executor.worker.loaded
    encode, lengths = loaded.model.encode, []

    def encoded(kind: str, tensors: Any) -> torch.Tensor:
        lengths.append(tensors[FEATURES].shape[1])
        return encode(kind, tensors)

    loaded.model.encode = encoded
    allocated = fill_encoder_cache(loaded.model, tmp_path, 60)
    assert allocated is not None
    assert allocated.shape == (60, loaded.spec.hidden_size)
    assert lengths == [600]
    assert fill_encoder_cache(loaded.model, tmp_path, 5) is not None  # less than a window has
    assert lengths == [600, 100]


def test_a_full_step_is_measured_beside_a_full_encoder_cache(
    device: FakeDevice, tmp_path: Path
) -> None:
    FAMILIES["llava"](tmp_path)
    llm = device.engine(tmp_path)
    loaded = llm.core.executor.worker.loaded
    capacity = encoder_capacity(24, 64)
    allocated = fill_encoder_cache(loaded.model, tmp_path, capacity)
    assert allocated is not None
    assert allocated.shape == (96, loaded.spec.hidden_size)
    encoded: list[bool] = []
    meter = FakeMeter(iter([60]), peak=70, free=800, total=1000)

    def fill_encoder() -> torch.Tensor:
        encoded.append(meter.num_started == 1)
        return allocated

    profile(
        loaded.model, EngineConfig(model="m", max_num_seqs=2), 24, [4], torch.float32,
        llm.core.capacity.layout, meter, lambda: None, fill_encoder=fill_encoder,
    )  # fmt: skip
    assert encoded == [True]


def test_encoders_leave_the_device_where_a_model_sleeps(device: FakeDevice, tmp_path: Path) -> None:
    FAMILIES["llava"](tmp_path)
    loaded: Any = device.engine(tmp_path).core.executor.worker.loaded
    sleeping = {tensor.data_ptr() for tensor in model_tensors(loaded)}
    encoder = [tensor.data_ptr() for tensor in iter_tensors(loaded.model.family)]
    assert len(encoder) > 20
    assert set(encoder) <= sleeping
