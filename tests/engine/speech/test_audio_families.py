"""Decoders that hear: their tokens are the references', in chunks, cached and with two clips."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, silu

from engine import LLM, LoRARequest, SamplingParams
from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.multimodal.audio import SAMPLE_RATE
from engine.multimodal.audio_prompts import AudioProcessor
from engine.text.tokenizer_folder import convert_tokenizer
from tests.engine.multimodal.models import tokenizer_with
from tests.engine.speech.models import sound

SECONDS = 1
STATES = 50 * SECONDS
NUM_TOKENS = 10
AUDIO = "<|audio|>"
RESERVED = "<|reserved|>"
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
ENCODER = {
    "num_mel_bins": 80,
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "max_source_positions": STATES,
}
#: Longer than a window, shorter, of an odd number of frames, and two clips.
PROMPTS = [
    (f"What is said? {AUDIO} Answer:", [sound(1, 2.3)]),
    (AUDIO, [sound(2, 0.31)]),
    (f"One: {AUDIO} two: {AUDIO} done", [sound(3, 1.234), sound(4, 0.055)]),
]


@dataclass(frozen=True)
class Reference:
    """Of a tiny random model.

    Attributes:
        hear: vectors of a clip, float32 [n, hidden].
        logits: of a sequence's last token, of vectors [1, n, hidden].
        embed: vectors of token ids.
    """

    hear: Callable[[np.ndarray], Tensor]
    embed: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]


def expected_tokens(
    reference: Reference, tokenizer: Any, text: str, clips: list[np.ndarray]
) -> list[int]:
    """Greedy, each token by a pass over all of them."""
    heard = iter(clips)
    parts = []
    with torch.no_grad():
        for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
            is_clip = token == tokenizer.convert_tokens_to_ids(AUDIO)
            vectors = (
                reference.hear(next(heard)) if is_clip else reference.embed(torch.tensor([token]))
            )
            parts.append(vectors)
        vectors, ids = torch.cat(parts), []
        for _ in range(NUM_TOKENS):
            ids.append(int(reference.logits(vectors[None])[0, -1].argmax()))
            vectors = torch.cat((vectors, reference.embed(torch.tensor(ids[-1:]))))
    return ids


def features_of(clip: np.ndarray, seconds: float, **options: Any) -> Any:
    extractor = tf.WhisperFeatureExtractor(feature_size=80, chunk_length=seconds)
    return extractor(clip, sampling_rate=SAMPLE_RATE, return_tensors="pt", **options)


def make_voxtral(folder: Path, tokenizer: Any = None) -> tuple[Reference, Any]:
    """`tokenizer`: isn't saved to the folder; None: the tests' own, which is."""
    torch.manual_seed(0)
    if tokenizer is None:
        tokenizer = tokenizer_with(AUDIO)
        tokenizer.save_pretrained(folder)
    config = tf.VoxtralConfig(
        audio_config={
            "num_mel_bins": 80,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 320,
            "max_source_positions": STATES,
            "initializer_range": 0.3,
        },
        text_config={
            "model_type": "llama", **TEXT, "head_dim": 16, "rope_theta": 1e4,
            "vocab_size": len(tokenizer),
        },
        audio_token_id=tokenizer.convert_tokens_to_ids(AUDIO),
    )  # fmt: skip
    model = tf.VoxtralForConditionalGeneration(config).eval()
    model.save_pretrained(folder)

    def hear(clip: np.ndarray) -> Tensor:
        samples = SAMPLE_RATE * SECONDS
        options = {"padding": True, "truncation": False, "pad_to_multiple_of": samples}
        features = features_of(clip, SECONDS, **options).input_features
        windows = features[0].unflatten(1, (-1, 2 * STATES)).transpose(0, 1)
        return model.get_audio_features(windows).pooler_output

    return _reference(model, hear), tokenizer


def make_omni(folder: Path, prefix: str = "") -> tuple[Reference, Any]:
    torch.manual_seed(0)
    tokenizer = tokenizer_with("<|audio_bos|>", AUDIO, "<|audio_eos|>")
    config = tf.Qwen2_5OmniThinkerConfig(
        audio_config={**ENCODER, "n_window": 20, "output_dim": 64, "initializer_range": 0.3},
        vision_config={
            "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
            "out_hidden_size": 64,
        },
        text_config={
            **TEXT, "vocab_size": len(tokenizer),
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3],
            },
        },
        audio_token_index=tokenizer.convert_tokens_to_ids(AUDIO),
    )  # fmt: skip
    model = tf.Qwen2_5OmniThinkerForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"chunk_length": 3}))

    def hear(clip: np.ndarray) -> Tensor:
        features = features_of(clip, 3, padding="max_length", return_attention_mask=True)
        output = model.get_audio_features(
            features.input_features, feature_attention_mask=features.attention_mask
        )
        return output.last_hidden_state

    return _reference(model, hear), tokenizer


def _reference(model: Any, hear: Callable[[np.ndarray], Tensor]) -> Reference:
    def logits(vectors: Tensor) -> Tensor:
        output: Tensor = model(inputs_embeds=vectors).logits
        return output

    return Reference(hear, model.get_input_embeddings(), logits)


class UltravoxProjector(nn.Module):
    """As github.com/fixie-ai/ultravox publishes it."""

    def __init__(self, encoder: tf.WhisperConfig, *, norm_in_middle: bool, num_layers: int) -> None:
        super().__init__()
        self.ln_pre = nn.RMSNorm(64 * 8, eps=1e-6)
        self.norm_in_middle, self.num_layers = norm_in_middle, num_layers
        if num_layers:
            self.linear_in = nn.Linear(64 * 8, 64)
            self.embed_positions = nn.Embedding(STATES, 64)
            whisper = tf.models.whisper.modeling_whisper.WhisperEncoderLayer
            self.layers = nn.ModuleList(whisper(encoder) for _ in range(num_layers))
            self.ln_post, self.linear_out = nn.RMSNorm(64, eps=1e-6), nn.Linear(64, 64)
            return
        self.linear_1, self.linear_2 = (
            nn.Linear(64 * 8, 96, bias=False),
            nn.Linear(48, 64, bias=False),
        )
        if norm_in_middle:
            self.ln_mid = nn.RMSNorm(48, eps=1e-6)
        else:
            self.ln_post = nn.RMSNorm(64, eps=1e-6)

    def forward(self, states: Tensor) -> Tensor:
        x = self.ln_pre(pad(states, (0, 0, 0, -len(states) % 8)).view(-1, 64 * 8))
        if self.num_layers:
            x = self.linear_in(x)
            x = (x + self.embed_positions.weight[: len(x)])[None]
            for layer in self.layers:
                x = layer(x, None)
            return self.linear_out(self.ln_post(x[0]))
        values, gate = self.linear_1(x).chunk(2, dim=-1)
        x = silu(gate) * values
        if self.norm_in_middle:
            return self.linear_2(self.ln_mid(x))
        return self.ln_post(self.linear_2(x))


def make_ultravox(
    folder: Path, *, parts: bool = False, num_layers: int = 0
) -> tuple[Reference, Any]:
    """`parts`: the text model and the encoder lie in folders of their own."""
    torch.manual_seed(0)
    tokenizer = tokenizer_with(RESERVED, AUDIO)
    text = tf.LlamaForCausalLM(tf.LlamaConfig(**TEXT, vocab_size=len(tokenizer) - 1)).eval()
    whisper = tf.WhisperForConditionalGeneration(
        tf.WhisperConfig(
            **ENCODER, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=96,
            vocab_size=320, init_std=0.3, pad_token_id=2, bos_token_id=2, eos_token_id=2,
        )
    ).eval()  # fmt: skip
    encoder = whisper.model.encoder
    projector = UltravoxProjector(
        whisper.config, norm_in_middle=parts, num_layers=num_layers
    ).eval()
    for parameter in projector.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1)
    weights = {f"multi_modal_projector.{n}": t for n, t in projector.state_dict().items()}
    config: dict[str, Any] = {
        "architectures": ["UltravoxModel"],
        "model_type": "ultravox",
        "hidden_size": 96,
        "stack_factor": 8,
        "projector_act": "swiglu",
        "projector_ln_mid": parts,
        "num_projector_layers": num_layers,
        "torch_dtype": "float32",
    }
    if parts:
        for name, model in (("text_model_id", text), ("audio_model_id", whisper)):
            model.save_pretrained(folder / name)
            config[name] = str(folder / name)
        config["audio_config"] = {"num_mel_bins": 80, "max_source_positions": STATES}
    else:
        weights |= {f"audio_tower.{n}": t for n, t in encoder.state_dict().items()}
        weights |= {f"language_model.{n}": t for n, t in text.state_dict().items()}
        config |= {"text_config": text.config.to_dict(), "audio_config": whisper.config.to_dict()}
    save_file({n: t.contiguous() for n, t in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)

    def hear(clip: np.ndarray) -> Tensor:
        num_samples = -(-len(clip) // 160) * 160
        clip = np.pad(clip, (0, num_samples - len(clip)))
        features = features_of(clip, SECONDS, padding="longest", truncation=False).input_features[0]
        vectors = []
        for window in features.split(2 * STATES, dim=1):
            x = gelu(encoder.conv2(gelu(encoder.conv1(window[None])))).transpose(1, 2)
            x = x + encoder.embed_positions.weight[: x.shape[1]]
            for layer in encoder.layers:
                x = layer(x, None)
            vectors.append(projector(encoder.layer_norm(x)[0]))
        return torch.cat(vectors)

    return _reference(text, hear), tokenizer


FAMILIES: dict[str, Callable[[Path], tuple[Reference, Any]]] = {
    "voxtral": make_voxtral,
    "omni": make_omni,
    "ultravox": make_ultravox,
    "ultravox-parts": partial(make_ultravox, parts=True),
    "ultravox-layers": partial(make_ultravox, num_layers=2),
}


@dataclass(frozen=True)
class Family:
    folder: Path
    reference: Reference
    tokens: list[list[int]]


SLOW = [pytest.mark.slow]
#: The layers of one, and adapters of others, take the same ways.
PARAMS = [pytest.param(name, marks=SLOW if name == "ultravox-layers" else []) for name in FAMILIES]


@pytest.fixture(scope="module", params=PARAMS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp(request.param)
    reference, tokenizer = FAMILIES[request.param](folder)
    tokens = [expected_tokens(reference, tokenizer, *prompt) for prompt in PROMPTS]
    return Family(folder, reference, tokens)


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="float32", num_gpu_blocks_override=256, block_size=16, **options)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}], ids=["whole", "chunks"])
def test_tokens_equal_the_reference(family: Family, options: dict[str, Any]) -> None:
    llm = open_llm(family.folder, **options)
    prompts = [
        {"prompt": text, "multi_modal_data": {"audio": clips if len(clips) > 1 else clips[0]}}
        for text, clips in PROMPTS
    ]
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for _ in range(2):  # the second time prompts are cached
        results = llm.generate(prompts, sampling)
        assert [result.outputs[0].token_ids for result in results] == family.tokens
    assert results[0].num_cached_tokens
    llm.llm_engine.core.check_integrity()


def test_vectors_stand_in_for_sound_where_they_are_taken(family: Family) -> None:
    text, clips = PROMPTS[0]
    with torch.no_grad():
        vectors = family.reference.hear(clips[0])
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompt = {"prompt": text, "multi_modal_data": {"audio": vectors}}
    [result] = open_llm(family.folder, enable_prompt_embeds=True).generate(prompt, sampling)
    assert result.outputs[0].token_ids == family.tokens[0]
    for refused, options, why in (
        (vectors, {}, "need enable_prompt_embeds"),
        (vectors[:, 1:], {"enable_prompt_embeds": True}, "must be float32"),
        (vectors * np.nan, {"enable_prompt_embeds": True}, "NaN"),
    ):
        prompt = {"prompt": text, "multi_modal_data": {"audio": refused}}
        with pytest.raises(InvalidRequest, match=why):
            open_llm(family.folder, **options).generate(prompt, sampling)


def write_adapter(model: Path, folder: Path) -> tuple[Path, Path]:
    """An adapter of the text part, and the model with it inside."""
    adapter, merged = folder / "adapter", folder / "merged"
    adapter.mkdir()
    shutil.copytree(model, merged)
    weights = load_file(model / "model.safetensors")
    random = torch.Generator().manual_seed(4)
    tensors: dict[str, Tensor] = {}
    for name in list(weights):
        is_encoder = "audio_tower" in name or "visual" in name
        if is_encoder or not name.endswith(("q_proj.weight", "down_proj.weight")):
            continue
        rows, columns = weights[name].shape
        down = torch.randn(8, columns, generator=random) * 0.15
        up = torch.randn(rows, 8, generator=random) * 0.15
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
        weights[name] = weights[name] + 1.5 * up @ down
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 12,
        "target_modules": ["q_proj", "down_proj"],
    }
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, adapter / "adapter_model.safetensors")
    save_file(weights, merged / "model.safetensors")
    return adapter, merged


@pytest.mark.parametrize(
    "name", ["voxtral", pytest.param("omni", marks=SLOW), pytest.param("ultravox", marks=SLOW)]
)
def test_an_adapter_of_the_text_part_says_what_the_merged_model_says(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    FAMILIES[name](tmp_path / "model")
    adapter, merged = write_adapter(tmp_path / "model", tmp_path)
    prompts = [{"prompt": text, "multi_modal_data": {"audio": clips}} for text, clips in PROMPTS]
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    llm = open_llm(tmp_path / "model", enable_lora=True)
    adapted = llm.generate(prompts, sampling, lora_request=LoRARequest("a", 1, str(adapter)))
    expected = open_llm(merged).generate(prompts, sampling)
    base = llm.generate(prompts, sampling)
    tokens = [
        [result.outputs[0].token_ids for result in results] for results in (adapted, expected, base)
    ]
    assert tokens[0] == tokens[1] != tokens[2]


def test_a_clip_takes_as_many_tokens_as_the_reference_has_vectors(family: Family) -> None:
    processor = AudioProcessor.from_folder(family.folder)
    for count in (640, 641, 1279, 1281, 16_000, 16_001, 33_440):
        clip = sound(1, 3)[:count]
        with torch.no_grad():
            assert processor.prepare(clip).num_vectors == len(family.reference.hear(clip)), count


def test_the_published_omni_runs_its_thinker(tmp_path: Path) -> None:
    """Its names begin with "thinker.", and what speaks lies beside it."""
    reference, tokenizer = make_omni(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = load_file(tmp_path / "model.safetensors")
    named = {f"thinker.{name}": tensor for name, tensor in weights.items()}
    save_file(named | {"talker.x": torch.zeros(1)}, tmp_path / "model.safetensors")
    published = {
        "architectures": ["Qwen2_5OmniModel"],
        "model_type": "qwen2_5_omni",
        "thinker_config": config,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    text, clips = PROMPTS[0]
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompt = {"prompt": text, "multi_modal_data": {"audio": clips[0]}}
    [result] = open_llm(tmp_path).generate(prompt, sampling)
    assert result.outputs[0].token_ids == expected_tokens(reference, tokenizer, text, clips)


def test_a_voxtral_with_mistrals_vocabulary_alone_hears(tmp_path: Path) -> None:
    special = [{"rank": n, "token_str": name} for n, name in enumerate(["<unk>", "<s>", "</s>"])]
    special.append({"rank": 24, "token_str": AUDIO})
    size = {"default_vocab_size": 256 + 30, "default_num_special_tokens": 30}
    vocab = [{"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode()} for n in range(256)]
    content = {"config": {"pattern": "[^ ]+| ", **size}, "vocab": vocab, "special_tokens": special}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tekken.json").write_text(json.dumps(content))
    convert_tokenizer(tmp_path / "model", tmp_path / "converted")
    file = tmp_path / "converted" / "tokenizer.json"
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_file=str(file))
    reference, _ = make_voxtral(tmp_path / "model", tokenizer)
    assert not list((tmp_path / "model").glob("tokenizer*"))
    llm = open_llm(tmp_path / "model")
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for text, clips in PROMPTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {"audio": clips}}
        [result] = llm.generate(prompt, sampling)
        assert result.outputs[0].token_ids == expected_tokens(reference, tokenizer, text, clips)
    # A text begins with <s>, as Mistral's do.
    [result] = llm.generate({"prompt": AUDIO, "multi_modal_data": {"audio": PROMPTS[1][1]}})
    assert result.prompt_token_ids[:2] == [1, 24]


def test_an_ultravox_whose_tokenizer_lacks_the_placeholder_is_refused(tmp_path: Path) -> None:
    make_ultravox(tmp_path)
    tokenizer_with("<|other|>", RESERVED).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"no token <\|audio\|>"):
        AudioProcessor.from_folder(tmp_path)
