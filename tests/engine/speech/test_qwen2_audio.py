"""A decoder that hears: Qwen2-Audio's tokens are `transformers`', batched, cached and in chunks."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers as tf

from engine import LLM, SamplingParams
from engine.contract.errors import InvalidRequest
from engine.multimodal.audio import SAMPLE_RATE
from engine.multimodal.audio_prompts import AudioProcessor
from engine.multimodal.inputs import ANSWERS, PrepareRequest
from engine.multimodal.sound_files import decode_sound
from engine.system.worker_process import WorkerProcess
from tests.e2e.test_speech import wav
from tests.engine.multimodal.models import CHAT_TEMPLATE, tokenizer_with
from tests.engine.speech.models import sound

AUDIO = "<|AUDIO|>"
SECONDS = 2
NUM_TOKENS = 12


def make_qwen2_audio(folder: Path) -> Any:
    """A tiny random model and its processor, saved to a folder."""
    torch.manual_seed(0)
    tokenizer = tokenizer_with("<|audio_bos|>", AUDIO, "<|audio_eos|>")
    tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "{% elif", "{% elif part['type'] == 'audio' %}<|AUDIO|>{% elif", 1
    )
    config = tf.Qwen2AudioConfig(
        audio_config={
            "num_mel_bins": 80,
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "max_source_positions": 50 * SECONDS,
            "initializer_range": 0.3,
        },
        text_config={
            "model_type": "qwen2",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "vocab_size": len(tokenizer),
            "initializer_range": 0.3,
            "eos_token_id": None,
            "bos_token_id": None,
            "tie_word_embeddings": False,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids(AUDIO),
    )
    model = tf.Qwen2AudioForConditionalGeneration(config).eval()
    extractor = tf.WhisperFeatureExtractor(feature_size=80, chunk_length=SECONDS)
    processor = tf.Qwen2AudioProcessor(extractor, tokenizer, tokenizer.chat_template)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


def expected_tokens(model: Any, processor: Any, text: str, audios: list[np.ndarray]) -> list[int]:
    """Greedy, each token by a pass over all of them."""
    inputs = processor(
        text=text, audio=audios, sampling_rate=SAMPLE_RATE, return_tensors="pt", padding=True
    )
    ids: list[int] = []
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            ids.append(int(model(**inputs).logits[0, -1].argmax()))
            inputs["input_ids"] = torch.cat((inputs["input_ids"], torch.tensor([ids[-1:]])), 1)
            ones = torch.ones((1, 1), dtype=torch.long)
            inputs["attention_mask"] = torch.cat((inputs["attention_mask"], ones), 1)
    return ids


PROMPTS = [
    (f"What is said? {AUDIO} Answer:", [sound(1, 2)]),
    (f"{AUDIO}", [sound(2, 0.31)]),
    (f"One: {AUDIO} two: {AUDIO} done", [sound(3, 1.234), sound(4, 0.055)]),
]


@pytest.fixture(scope="module")
def qwen2_audio(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    folder = tmp_path_factory.mktemp("qwen2-audio")
    model, processor = make_qwen2_audio(folder)
    return folder, [expected_tokens(model, processor, *prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}], ids=["whole", "chunks"])
def test_tokens_equal_those_of_transformers(
    qwen2_audio: tuple[Path, list[list[int]]], options: dict[str, Any]
) -> None:
    folder, expected = qwen2_audio
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=256, block_size=16, **options)
    prompts = [
        {"prompt": text, "multi_modal_data": {"audio": audios if len(audios) > 1 else audios[0]}}
        for text, audios in PROMPTS
    ]
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for _ in range(2):  # the second time prompts are cached
        results = llm.generate(prompts, sampling)
        assert [result.outputs[0].token_ids for result in results] == expected
    assert results[0].num_cached_tokens
    llm.llm_engine.core.check_integrity()


def test_offline_chats_hear_all_of_their_parts(
    qwen2_audio: tuple[Path, list[list[int]]],
) -> None:
    llm = LLM(str(qwen2_audio[0]), dtype="float32", num_gpu_blocks_override=256, block_size=16)
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    file = wav(sound(2, 0.31))
    data = base64.b64encode(file).decode()
    parts: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
        {"audio_url": f"data:audio/wav;base64,{data}"},
        {"type": "audio", "audio": np.concatenate(list(decode_sound(file)))},
    ]
    chats: list[Any] = [[{"role": "user", "content": [part]}] for part in parts]
    results = llm.chat(chats, sampling, use_tqdm=False)
    tokens = [list(result.outputs[0].token_ids) for result in results]
    assert tokens == [tokens[0]] * len(parts)
    with pytest.raises(InvalidRequest):
        llm.chat([{"role": "user", "content": [{"audio_url": "data:;base64,AAAA"}]}], sampling)


def test_other_sound_in_the_same_prompt_is_no_hit(
    qwen2_audio: tuple[Path, list[list[int]]],
) -> None:
    llm = LLM(str(qwen2_audio[0]), dtype="float32", num_gpu_blocks_override=256, block_size=16)
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    texts = [
        llm.generate({"prompt": AUDIO, "multi_modal_data": {"audio": sound(seed)}}, sampling)[0]
        for seed in (1, 2)
    ]
    assert texts[1].num_cached_tokens == 0
    assert texts[0].outputs[0].token_ids != texts[1].outputs[0].token_ids


@pytest.mark.parametrize(
    ("data", "text", "message"),
    [
        ({"audio": sound(1, 2.1)}, AUDIO, "hears 2 s"),
        ({"audio": sound(1, 0.005)}, AUDIO, "too short"),
        ({"audio": sound(1)}, "nothing", "0 placeholders for 1 audio"),
        ({"image": sound(1)}, AUDIO, "the key 'audio'"),
    ],
)
def test_what_cant_be_heard_is_refused(
    qwen2_audio: tuple[Path, list[list[int]]], data: dict[str, Any], text: str, message: str
) -> None:
    llm = LLM(str(qwen2_audio[0]), dtype="float32", num_gpu_blocks_override=64)
    with pytest.raises(InvalidRequest, match=message):
        llm.generate({"prompt": text, "multi_modal_data": data})


def test_tokens_are_counted_as_transformers_counts_them(
    qwen2_audio: tuple[Path, list[list[int]]],
) -> None:
    processor = AudioProcessor.from_folder(qwen2_audio[0])
    reference = tf.AutoProcessor.from_pretrained(qwen2_audio[0])
    for count in (400, 640, 641, 799, 800, 801, 1279, 1280, 1281, 31_999, 32_000):
        samples = sound(1, SECONDS)[:count]
        ids = reference(text=AUDIO, audio=samples, sampling_rate=SAMPLE_RATE)["input_ids"][0]
        assert processor.prepare(samples).num_vectors == len(ids), count


def test_the_media_worker_prepares_files_of_sound(
    qwen2_audio: tuple[Path, list[list[int]]],
) -> None:
    worker = WorkerProcess("engine.multimodal.worker", "media worker")

    def prepare(data: bytes, **fields: Any) -> Any:
        request = PrepareRequest(str(qwen2_audio[0]), data, kind="audio", **fields)
        return ANSWERS.decode(worker.request(msgspec.msgpack.encode(request), 60) or b"")

    try:
        prepared = prepare(wav(sound(1, 1.5)))
        assert (prepared.kind, prepared.num_vectors, prepared.seconds) == ("audio", 37, 1.5)
        for data, options, message in (
            (wav(sound(1, 40)), {}, "at most 2 s"),
            (b"no sound", {}, "can't be read"),
            (wav(sound(1)), {"size": 1}, "change nothing"),
        ):
            assert message in prepare(data, options=options).message
    finally:
        worker.close()
