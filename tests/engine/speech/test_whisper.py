"""Whisper gives `transformers`' tokens, however prompts are cut, cached, batched or preempted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import pytest
import torch
import transformers

from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError, InvalidRequest
from engine.models.speech.whisper import WhisperModel
from engine.multimodal.audio import SAMPLE_RATE, log_mel
from engine.multimodal.sound_files import decode_sound
from engine.speculative import replay
from tests.engine.speculative.seer import Seer
from tests.engine.speech.models import (
    DICKENS,
    JFK,
    JFK_TEXT,
    NO_TIMESTAMPS,
    START,
    expected,
    make_whisper,
    read_wav,
    sound,
    tiny_en,
)

NUM_TOKENS = 20
#: Several windows of sound, two of them the same, and prompts of several lengths.
CASES = [
    (sound(1), [START]),
    (sound(2, 0.4), [START, NO_TIMESTAMPS]),
    (sound(1), [START, *range(20, 45)]),
    (sound(3), [9, *range(50, 80), START]),
]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A model's folder, and the tokens of `CASES`."""
    folder = tmp_path_factory.mktemp("whisper")
    model = make_whisper(folder)
    return folder, [expected(model, samples, prompt, NUM_TOKENS) for samples, prompt in CASES]


def _llm(folder: Path, **settings: Any) -> LLM:
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        **{"num_gpu_blocks_override": 256, "block_size": 16} | settings,
    )


def _prompts(cases: list[tuple[Any, list[int]]] = CASES, **more: Any) -> list[dict[str, Any]]:
    return [
        {"prompt_token_ids": prompt, "multi_modal_data": {"audio": samples}} | more
        for samples, prompt in cases
    ]


def _run(llm: LLM, prompts: list[dict[str, Any]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]


def _count_encodings(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The blocks to which the model encodes from now on."""
    model: WhisperModel = llm.llm_engine.core.executor.worker.loaded.model
    encode, encoded = model.encode_to_cache, list[list[int]]()

    def counted(tensors: Any, block_ids: list[int], adapter: Any) -> None:
        encoded.append(block_ids)
        encode(tensors, block_ids, adapter)

    monkeypatch.setattr(model, "encode_to_cache", counted)
    return encoded


def test_tokens_equal_those_of_transformers_together_cached_and_alone(
    whisper: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = whisper
    llm = _llm(folder)
    encoded = _count_encodings(llm, monkeypatch)
    assert _run(llm, _prompts()) == expected
    assert len(encoded) == 3  # two of four heard the same
    assert _run(llm, _prompts()) == expected
    assert len(encoded) == 3
    assert llm.llm_engine.core.scheduler.kv.num_hit_tokens
    for prompt, tokens in zip(_prompts(), expected, strict=True):
        llm.reset_prefix_cache()
        assert _run(llm, [prompt]) == [tokens]
    llm.llm_engine.core.check_integrity()


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_chunks_preemption_and_a_full_pool_change_no_token(
    whisper: tuple[Path, list[list[int]]], enable_prefix_caching: bool
) -> None:
    folder, expected = whisper
    # A sequence takes 4 blocks of states and up to 4 of tokens.
    llm = _llm(
        folder,
        num_gpu_blocks_override=18,
        max_num_batched_tokens=8,
        enable_prefix_caching=enable_prefix_caching,
    )
    core = llm.llm_engine.core
    step, calls = core.step, 0

    def step_with_preemptions() -> Any:
        nonlocal calls
        calls += 1
        return core.preempt_all() if calls % 25 == 0 else step()

    core.step = step_with_preemptions  # type: ignore[method-assign]
    assert _run(llm, _prompts() * 2) == expected * 2
    assert core.scheduler.num_preemptions
    core.check_integrity()


def test_states_are_encoded_again_only_when_their_blocks_were_evicted(
    whisper: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = whisper
    llm = _llm(folder, num_gpu_blocks_override=10)
    encoded = _count_encodings(llm, monkeypatch)
    for _ in range(2):
        for index in (0, 1, 3, 0):
            assert _run(llm, [_prompts()[index]]) == [expected[index]]
    assert 6 <= len(encoded) <= 8
    assert _run(llm, [_prompts()[0]]) == [expected[0]]
    assert len(encoded) <= 8
    llm.llm_engine.core.check_integrity()


def test_one_tenants_sound_is_never_anothers_hit(
    whisper: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = whisper
    llm = _llm(folder)
    encoded = _count_encodings(llm, monkeypatch)
    for salt in ("a", "b", "a"):
        assert _run(llm, _prompts(CASES[2:3], cache_salt=salt)) == [expected[2]]
    assert len(encoded) == 2


def test_the_same_prompt_for_another_sound_hits_no_tokens(
    whisper: tuple[Path, list[list[int]]],
) -> None:
    folder, _ = whisper
    llm = _llm(folder)
    long = [START, *range(20, 55)]
    first, second = ({"prompt_token_ids": long, "multi_modal_data": {"audio": sound(seed)}}
                     for seed in (1, 2))  # fmt: skip
    tokens = _run(llm, [first])
    assert _run(llm, [second]) != tokens
    assert llm.llm_engine.core.scheduler.kv.num_hit_tokens == 0


def test_a_step_that_fails_in_the_encoder_fails_its_request_alone(
    whisper: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = whisper
    llm = _llm(folder)
    engine = llm.llm_engine
    model = engine.core.executor.worker.loaded.model
    broken = engine.media_processor().prepare(sound(2, 0.4)).tensors["features"]
    encode = model.encode_to_cache

    def failing(tensors: Any, block_ids: list[int], adapter: Any) -> None:
        if (tensors["features"] == broken).all():
            raise RuntimeError("The encoder broke.")
        encode(tensors, block_ids, adapter)

    monkeypatch.setattr(model, "encode_to_cache", failing)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(_prompts()):
        engine.add_request(str(index), prompt, params)
    results = {}
    while engine.has_unfinished_requests():
        results |= {result.request_id: result for result in engine.step()}
    assert "The encoder broke." in str(results.pop("1").error)
    for name, result in results.items():
        assert list(result.outputs[0].token_ids) == expected[int(name)]
    monkeypatch.setattr(model, "encode_to_cache", encode)
    assert _run(llm, _prompts()[1:2]) == [expected[1]]  # what never came isn't cached
    engine.core.check_integrity()


def test_prompts_have_vllms_forms(whisper: tuple[Path, list[list[int]]]) -> None:
    folder, expected = whisper
    llm = _llm(folder)
    encoder = {"prompt": "", "multi_modal_data": {"audio": (CASES[1][0], 16_000)}}
    forms: list[dict[str, Any]] = [
        {"encoder_prompt": encoder, "decoder_prompt": CASES[1][1]},
        {"encoder_prompt": encoder, "decoder_prompt": {"prompt_token_ids": CASES[1][1]}},
        {"prompt_token_ids": CASES[1][1], "multi_modal_data": {"audio": [CASES[1][0]]}},
    ]
    assert _run(llm, forms) == [expected[1]] * 3


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ({"prompt_token_ids": [START]}, "multi_modal_data"),
        (
            {"prompt_token_ids": [START], "multi_modal_data": {"image": 1}},
            "multi_modal_data",
        ),
        (
            {"prompt_token_ids": [START], "multi_modal_data": {"audio": sound(1, 2.0)}},
            "multi_modal_data",
        ),
        ({"encoder_prompt": "text", "decoder_prompt": [START]}, "encoder_prompt"),
        (
            {"encoder_prompt": {"multi_modal_data": {"audio": sound(1)}}, "decoder_prompt": 7},
            "decoder_prompt",
        ),
    ],
)
def test_prompts_without_one_window_of_sound_are_refused_by_field(
    whisper: tuple[Path, list[list[int]]], prompt: dict[str, Any], param: str
) -> None:
    llm = _llm(whisper[0])
    with pytest.raises(InvalidRequest) as refused:
        llm.generate(prompt)
    assert refused.value.param == param
    llm.llm_engine.core.check_integrity()


def test_frames_of_the_sound_and_of_some_silence_are_encoded_alone_if_requested(
    tmp_path: Path,
) -> None:
    model = make_whisper(tmp_path, max_source_positions=400)
    samples, prompt, num_states = sound(2, 0.4), [START, NO_TIMESTAMPS], 272
    # The oracle's window is as long as what is encoded.
    extractor = transformers.WhisperFeatureExtractor(chunk_length=8)
    features = extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
    encoder = model.get_encoder()
    positions = encoder.embed_positions.weight[:num_states].detach()
    encoder.embed_positions = torch.nn.Embedding.from_pretrained(positions)
    model.config.max_source_positions = num_states
    with torch.no_grad():
        states = encoder(features[..., : 2 * num_states])
        ids = torch.tensor([prompt])
        for _ in range(NUM_TOKENS):
            logits = model(encoder_outputs=states, decoder_input_ids=ids).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    llm = _llm(tmp_path, mm_processor_kwargs={"padding": "longest"})
    long = sound(1, 7.5)
    tokens, *_ = _run(llm, _prompts([(samples, prompt), (long, prompt)]))
    assert tokens == ids[0, len(prompt) :].tolist()
    padded = _run(_llm(tmp_path), _prompts([(samples, prompt), (long, prompt)]))
    assert padded[0] != tokens
    assert padded[1] == _run(llm, _prompts([(long, prompt)]))[0]


@torch.inference_mode()
def test_silence_is_computed_once_with_the_same_bits(
    whisper: tuple[Path, list[list[int]]],
) -> None:
    encoder = _llm(whisper[0]).llm_engine.core.executor.worker.loaded.model._encoder
    loud = torch.randn(80, 100)
    for num_frames in (4, 100):
        for num_heard in (*range(7), 93, 96, 97, 98, 99, 100):
            quiet = loud.clone()
            quiet[:, num_heard:] = -0.7
            both = torch.stack([quiet, loud])[:, :, :num_frames]
            states = num_frames // 2
            # Beside a loud window, all of its frames are computed.
            expected_states = encoder.batch_states(both, states)[0]
            assert torch.equal(encoder.batch_states(both[:1], states)[0], expected_states)


@pytest.mark.parametrize("options", [{"padding": "do_not_pad"}, {"size": 3}])
def test_other_options_of_the_processor_are_refused(
    whisper: tuple[Path, list[list[int]]], options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="padding") as caught:
        _llm(whisper[0], mm_processor_kwargs=options)
    assert caught.value.param == "mm_processor_kwargs"


def test_real_speech_becomes_its_text_by_ctranslate2s_tokens() -> None:
    dickens = np.concatenate([*decode_sound(DICKENS.read_bytes(), "file")])
    clips = [read_wav(JFK)[0], dickens[30 * SAMPLE_RATE :]]
    llm = LLM(str(tiny_en()), dtype="float32", num_gpu_blocks_override=256)
    prompts = [
        {
            "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (clip, SAMPLE_RATE)}},
            "decoder_prompt": "<|startoftranscript|><|notimestamps|>",
        }
        for clip in clips
    ]
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=100))
    assert results[0].outputs[0].text.strip() == JFK_TEXT
    peer = ctranslate2.models.Whisper(str(tiny_en()), compute_type="float32", intra_threads=1)
    for clip, result in zip(clips, results, strict=True):
        assert result.outputs[0].finish_reason == "stop"
        features = ctranslate2.StorageView.from_array(log_mel(clip, 80, 3000)[None])
        options: dict[str, Any] = {"beam_size": 1, "suppress_blank": False, "suppress_tokens": []}
        [theirs] = peer.generate(features, [result.prompt_token_ids], **options)
        assert list(result.outputs[0].token_ids)[:-1] == theirs.sequences_ids[0]


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"enable_chunked_prefill": False},
        {"cpu_kernels": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_only_changes_how_steps_run_changes_no_token(
    whisper: tuple[Path, list[list[int]]], options: dict[str, Any]
) -> None:
    folder, expected = whisper
    llm = _llm(folder, **options)
    assert _run(llm, _prompts()) == expected
    llm.llm_engine.core.check_integrity()


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}], ids=["float32", "int8"])
def test_bits_are_the_same_beside_others_resumed_drafted_and_elsewhere(
    whisper: tuple[Path, list[list[int]]], options: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)

    def bits(llm: LLM, prompts: list[dict[str, Any]]) -> list[Any]:
        return [result.outputs[0].logprobs for result in llm.generate(prompts, params)]

    isolated, other = _llm(whisper[0], **options), _llm(whisper[0], **options)
    expected = [bits(isolated, [prompt])[0] for prompt in _prompts()]
    core = other.llm_engine.core
    step, calls = core.step, 0

    def step_with_preemptions() -> Any:
        nonlocal calls
        calls += 1
        return core.preempt_all() if calls % 7 == 0 else step()

    core.step = step_with_preemptions  # type: ignore[method-assign]
    assert bits(other, _prompts()) == expected
    assert core.scheduler.num_preemptions
    for _ in range(2):
        assert bits(isolated, _prompts()) == expected
    assert isolated.llm_engine.core.stats.spec_decode_num_accepted_tokens_total


def test_the_same_sound_again_takes_no_encoding_and_one_step_of_drafts_for_its_tenant_alone(
    whisper: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = whisper
    llm = _llm(folder)
    encoded, core = _count_encodings(llm, monkeypatch), llm.llm_engine.core
    step, steps = core.step, [0]

    def counted_step() -> Any:
        steps[-1] += 1
        return step()

    monkeypatch.setattr(core, "step", counted_step)

    def num_steps(case: int, salt: str, **params: Any) -> int:
        steps.append(0)
        prompts = _prompts(CASES[case : case + 1], cache_salt=salt)
        if params:
            llm.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **params))
        else:
            assert _run(llm, prompts) == [expected[case]]
        return steps[-1]

    first = [num_steps(0, "a"), num_steps(1, "a")]
    assert [num_steps(0, "a"), num_steps(1, "a")] == [2, 2]
    assert len(encoded) == 2
    # Nothing is replayed to other tenants, to sampled answers, and after the cache was reset.
    assert num_steps(0, "b") == first[0]
    assert len(encoded) == 3
    assert num_steps(0, "a", temperature=1, seed=3) == first[0]
    # An answer that turns out to be another one is drafted once.
    num_drafts = core.stats.spec_decode_num_drafts_total
    num_steps(0, "a", temperature=0, logit_bias={expected[0][5]: -100})
    assert core.stats.spec_decode_num_drafts_total == num_drafts + 1
    core.check_integrity()
    assert core.reset_prefix_cache()
    assert num_steps(1, "a") == first[1]


def test_answers_that_are_replayed_have_limited_memory(
    whisper: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = _llm(whisper[0])
    monkeypatch.setattr(replay, "MAX_TOKENS", 2 * NUM_TOKENS + 4)

    def num_drafts(case: int) -> int:
        stats = llm.llm_engine.core.stats
        previous = stats.spec_decode_num_drafts_total
        assert _run(llm, _prompts(CASES[case : case + 1])) == [whisper[1][case]]
        return stats.spec_decode_num_drafts_total - previous

    assert [num_drafts(case) for case in (0, 1, 0, 1)] == [0, 0, 1, 1]
    assert [num_drafts(case) for case in (2, 1, 2)] == [0, 0, 0]


def test_a_step_computes_no_more_logits_for_replays_than_for_other_drafts(
    whisper: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = _llm(whisper[0]).llm_engine.core
    monkeypatch.setattr("engine.core.engine_core.MAX_LOGITS", 5 * core.facts.vocab_size)
    llm = _llm(whisper[0])
    for _ in range(2):
        assert _run(llm, _prompts(CASES[:1])) == whisper[1][:1]
    stats = llm.llm_engine.core.stats
    assert stats.spec_decode_num_draft_tokens_total == 5 * stats.spec_decode_num_drafts_total
    assert stats.spec_decode_num_drafts_total == (NUM_TOKENS - 2) // 6


@pytest.mark.usefixtures("always_drafts")
def test_drafts_keep_the_rules_of_timestamps(whisper: tuple[Path, list[list[int]]]) -> None:
    rules = {"first": 200, "end": 2, "no_timestamps": NO_TIMESTAMPS, "max_initial": 20}
    params = SamplingParams(
        temperature=0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        detokenize=False,
        extra_args={"whisper_timestamps": rules},
    )

    def tokens(**settings: Any) -> list[list[int]]:
        results = _llm(whisper[0], **settings).generate(_prompts(), params)
        return [list(result.outputs[0].token_ids) for result in results]

    baseline = tokens()
    assert baseline != whisper[1]
    Seer.texts = {
        tuple(prompt): [output] for (_, prompt), output in zip(CASES, baseline, strict=True)
    }
    drafts = {"method": "ngram", "num_speculative_tokens": 5}
    assert tokens(speculative_config=drafts) == baseline


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "int8"}, {"quantization": "int8"}])
def test_few_bits_give_the_same_tokens_alone_and_together(
    whisper: tuple[Path, list[list[int]]], options: dict[str, Any]
) -> None:
    llm = _llm(whisper[0], **options)
    together = _run(llm, _prompts())
    llm.reset_prefix_cache()
    assert [_run(llm, [prompt])[0] for prompt in _prompts()] == together


def test_outputs_and_beams_share_their_sound(
    whisper: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = whisper
    llm = _llm(folder)
    encoded = _count_encodings(llm, monkeypatch)
    params = SamplingParams(n=3, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    [result] = llm.generate(_prompts()[2], params)
    assert [list(output.token_ids) for output in result.outputs] == [expected[2]] * 3
    beams = SamplingParams(
        n=2, use_beam_search=True, temperature=0, max_tokens=8, ignore_eos=True, detokenize=False
    )
    [first] = llm.generate(_prompts()[2], beams)
    llm.reset_prefix_cache()
    [again] = llm.generate(_prompts()[2], beams)
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in again.outputs]
    assert len(encoded) == 2
    llm.llm_engine.core.check_integrity()


def test_a_model_that_slept_hears_as_before(whisper: tuple[Path, list[list[int]]]) -> None:
    folder, expected = whisper
    llm = _llm(folder, enable_sleep_mode=True)
    assert _run(llm, _prompts()) == expected
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert _run(llm, _prompts()) == expected
