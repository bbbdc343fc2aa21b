"""Tokens begin when `transformers` says so, however their prompt is cut, batched or preempted."""

from __future__ import annotations

import json
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from transformers.utils import ModelOutput

from engine import LLM, PoolingParams, SamplingParams
from engine.checkpoints.ctranslate2 import CTranslate2Weights, ctranslate2_folder
from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.contract.messages import ControlRequest
from engine.core import token_alignment
from engine.core.token_alignment import token_times
from engine.multimodal.audio import SAMPLE_RATE
from engine.serving.operator_commands import Pause
from tests.engine.speech.models import (
    JFK,
    NO_TIMESTAMPS,
    START,
    make_whisper,
    read_wav,
    sound,
    tiny_en,
)

HEADS = [[0, 1], [2, 0], [2, 3]]
PROMPT = [START, NO_TIMESTAMPS, *range(20, 50)]
#: (sound, prompt, first token that is aligned, number of states)
CASES = [
    (sound(1), PROMPT, 2, 50),
    (sound(2, 0.4), PROMPT[:20], 1, 20),
    (sound(3), [9, *range(50, 90), START], 0, 33),
]


def reference_times(
    model: Any, features: torch.Tensor, prompt: list[int], first: int, num_states: int
) -> list[float]:
    """By `transformers`, of each token from the first one on."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(features, decoder_input_ids=torch.tensor([prompt]), output_attentions=True)
    generated = ModelOutput(
        sequences=torch.tensor([prompt]), cross_attentions=[output.cross_attentions]
    )
    times = model._extract_token_timestamps(
        generated,
        model.generation_config.alignment_heads,
        num_frames=2 * num_states,
        num_input_ids=first,
    )
    return times[0, first:-1].tolist()  # the last one stands for what comes next


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    """A model's folder, and the times of `CASES`."""
    folder = tmp_path_factory.mktemp("whisper")
    model = make_whisper(folder)
    model.generation_config.alignment_heads = HEADS
    model.generation_config.save_pretrained(folder)
    extractor = tf.WhisperFeatureExtractor(chunk_length=1)
    expected = []
    for samples, prompt, first, num_states in CASES:
        features = extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        expected.append(reference_times(model, features.input_features, prompt, first, num_states))
    return folder, expected


def _llm(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        **{"num_gpu_blocks_override": 256, "block_size": 16} | options,
    )


def _align(llm: LLM, cases: list[tuple[Any, list[int], int, int]]) -> list[list[float]]:
    """By the engine, while it also generates."""
    engine = llm.llm_engine
    generate = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    for index, (samples, prompt, first, num_states) in enumerate(cases):
        prompt_with_sound = {"prompt_token_ids": prompt, "multi_modal_data": {"audio": samples}}
        align = PoolingParams(task="align", align_from=first, num_states=num_states)
        engine.add_request(f"generate-{index}", prompt_with_sound, generate)
        engine.add_request(str(index), prompt_with_sound, align)
    times: dict[int, list[float]] = {}
    while engine.has_unfinished_requests():
        for result in engine.step():
            assert result.error is None
            if not result.request_id.startswith("generate"):
                times[int(result.request_id)] = result.outputs.data.tolist()
    engine.core.check_integrity()
    return [times[index] for index in range(len(cases))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8},
        {"async_scheduling": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"cpu_kernels": False},
    ],
    ids=lambda options: next(iter(options), "default"),
)
def test_times_equal_those_of_transformers(
    whisper: tuple[Path, list[list[float]]], options: dict[str, Any]
) -> None:
    folder, expected = whisper
    llm = _llm(folder, **options)
    for _ in range(2):  # the second time prompts are cached, and computed all the same
        times = _align(llm, CASES)
        for actual, reference in zip(times, expected, strict=True):
            assert actual == pytest.approx(reference, abs=1e-4)


def test_a_preempted_prompt_is_aligned_from_its_beginning(
    whisper: tuple[Path, list[list[float]]],
) -> None:
    folder, expected = whisper
    llm = _llm(folder, num_gpu_blocks_override=18, max_num_batched_tokens=8)
    core = llm.llm_engine.core
    step, calls = core.step, 0

    def step_with_preemptions() -> Any:
        nonlocal calls
        calls += 1
        return core.preempt_all() if calls % 7 == 0 else step()

    core.step = step_with_preemptions  # type: ignore[method-assign]
    times = _align(llm, CASES * 2)
    assert core.scheduler.num_preemptions
    for actual, reference in zip(times, expected * 2, strict=True):
        assert actual == pytest.approx(reference, abs=1e-4)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"num_states": 50, "align_from": len(PROMPT)}, "align_from"),
        ({"num_states": 0}, "num_states"),
        ({"num_states": 51}, "num_states"),
        ({"task": "embed"}, "model"),
    ],
)
def test_what_cant_be_aligned_is_refused_by_field(
    whisper: tuple[Path, list[list[float]]], params: dict[str, Any], param: str
) -> None:
    llm = _llm(whisper[0])
    prompt = {"prompt_token_ids": PROMPT, "multi_modal_data": {"audio": sound(1)}}
    with pytest.raises(InvalidRequest) as refused:
        llm.llm_engine.add_request("0", prompt, PoolingParams(**{"task": "align"} | params))
    assert refused.value.param == param
    llm.llm_engine.core.check_integrity()


def _write_heads(folder: Path, pairs: list[Any]) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"alignment_heads": pairs}))


def test_a_distilled_model_with_its_teachers_heads_is_aligned_by_the_default_ones(
    tmp_path: Path,
) -> None:
    make_whisper(tmp_path)
    times = []
    for pairs in ([], [[3, 0], [0, 1]], [[0, 4]], [[-1, 0]]):
        _write_heads(tmp_path, pairs)
        times.append(_align(_llm(tmp_path), CASES))
    assert times == [times[0]] * 4


def test_alignment_heads_that_are_no_pairs_are_refused(tmp_path: Path) -> None:
    make_whisper(tmp_path)
    for pairs in ([[0]], ["ab"], [[0, None]], [[0, float("inf")]]):
        _write_heads(tmp_path, pairs)
        with pytest.raises(ModelLoadError, match="alignment_heads"):
            _llm(tmp_path)


def test_one_token_and_sound_of_one_state_have_a_time() -> None:
    assert token_times(np.random.rand(2, 1, 30).astype(np.float32)).tolist() == [0.0]
    assert token_times(np.random.rand(2, 5, 1).astype(np.float32)).tolist() == [0.0] * 5


def test_many_heads_take_no_multiple_of_the_memory_of_their_weights() -> None:
    weights = np.random.default_rng(0).random((40, 20, 100), dtype=np.float32)
    tracemalloc.start()
    try:
        token_times(weights)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < weights.nbytes


def test_a_request_ends_for_its_sender_when_its_times_are_there(
    whisper: tuple[Path, list[list[float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its inbox entry stays until then, and a pause waits for it."""
    may_align = threading.Event()
    finished: list[str] = []

    def wait_and_align(weights: np.ndarray) -> np.ndarray:
        assert may_align.wait(60)
        return token_times(weights)

    monkeypatch.setattr(token_alignment, "token_times", wait_and_align)
    engine = _llm(whisper[0]).llm_engine
    samples, prompt, first, num_states = CASES[0]
    with_sound = {"prompt_token_ids": prompt, "multi_modal_data": {"audio": samples}}
    align = PoolingParams(task="align", align_from=first, num_states=num_states)
    engine.add_request("times", with_sound, align)
    engine.core.requests["times"].on_done = lambda: finished.append("times")
    while not engine.core.is_aligning:
        engine.core.step()
    pause = Pause()
    pause.begin(engine.core, ControlRequest(command="pause", mode="wait"))
    assert not finished
    assert not pause.pop_completed(engine.core)
    may_align.set()
    while not finished:
        engine.core.step()
    assert len(pause.pop_completed(engine.core)) == 1


def test_steps_go_on_while_tokens_are_aligned(
    whisper: tuple[Path, list[list[float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another stream ends, and the engine wants another step, before the times are there."""
    folder, expected = whisper
    may_align = threading.Event()

    def wait_and_align(weights: np.ndarray) -> np.ndarray:
        assert may_align.wait(60)
        return token_times(weights)

    monkeypatch.setattr(token_alignment, "token_times", wait_and_align)
    engine = _llm(folder).llm_engine
    samples, prompt, first, num_states = CASES[0]
    with_sound = {"prompt_token_ids": prompt, "multi_modal_data": {"audio": samples}}
    align = PoolingParams(task="align", align_from=first, num_states=num_states)
    engine.add_request("times", with_sound, align)
    generate = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    engine.add_request("text", with_sound, generate)
    finished: list[Any] = []
    while not finished:
        finished += [result for result in engine.step() if result.finished]
    assert [result.request_id for result in finished] == ["text"]
    assert engine.core.has_work
    assert engine.core.is_aligning
    engine.core.check_integrity()  # the blocks are free already
    may_align.set()
    while len(finished) == 1:
        finished += engine.step()
    assert finished[1].outputs.data.tolist() == pytest.approx(expected[0], abs=1e-4)
    assert not engine.core.has_work


def test_sleep_and_a_failure_leave_no_request_without_an_answer(
    whisper: tuple[Path, list[list[float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _llm(whisper[0], enable_sleep_mode=True).llm_engine
    samples, prompt, first, num_states = CASES[0]
    with_sound = {"prompt_token_ids": prompt, "multi_modal_data": {"audio": samples}}
    align = PoolingParams(task="align", align_from=first, num_states=num_states)
    engine.add_request("0", with_sound, align)
    deltas: list[Any] = []
    while not engine.core.is_aligning:
        deltas += engine.core.step()
    assert [delta.pooled is not None for delta in deltas + engine.core.sleep()] == [True]
    engine.core.wake_up()
    monkeypatch.setattr(token_alignment, "token_times", lambda weights: 1 / 0)
    engine.add_request("1", with_sound, align)
    deltas = []
    while not deltas:
        deltas += engine.core.step()
    assert [(delta.finish_reason, delta.error.code) for delta in deltas] == [
        ("error", "engine_fault")
    ]


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({}, 0.02), pytest.param({"kv_cache_dtype": "int8"}, 0.1, marks=pytest.mark.slow)],
)
def test_real_speech_is_aligned_as_transformers_has_it(
    options: dict[str, Any], tolerance: float
) -> None:
    folder = ctranslate2_folder(tiny_en())
    samples, rate = read_wav(JFK)
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=512, **options)
    prompt = {
        "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (samples, rate)}},
        "decoder_prompt": "<|startoftranscript|><|notimestamps|>",
    }
    [result] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=100))
    ids = [50257, 50362, *result.outputs[0].token_ids[:-1]]
    times = _align(llm, [(samples, ids, 2, 550)])[0]
    model = _transformers_model(folder)
    features = tf.WhisperFeatureExtractor()(samples, sampling_rate=rate, return_tensors="pt")
    reference = reference_times(model, features.input_features, ids, 2, 550)
    assert times == pytest.approx(reference, abs=tolerance)


def _transformers_model(folder: Path) -> tf.WhisperForConditionalGeneration:
    """A folder's model with its own weights."""
    model = tf.WhisperForConditionalGeneration(tf.WhisperConfig.from_pretrained(folder)).eval()
    weights = CTranslate2Weights(tiny_en())
    state = {
        name: weights.get(name, tuple(tensor.shape)).float()
        for name, tensor in model.state_dict().items()
        if name in weights
    }
    missing, _ = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"proj_out.weight"}
    model.tie_weights()
    model.generation_config = tf.GenerationConfig.from_pretrained(folder)
    return model
