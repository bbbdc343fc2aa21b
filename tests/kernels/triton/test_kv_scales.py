"""Scales of fp8 KV caches: from the checkpoint, or measured; on the Triton kernels."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kernels
from engine import LLM
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, ModelLoadError
from engine.model_loader.loader import load_model, reload_model
from engine.models.decoder import NativeDecoder
from engine.models.forward_context import AttentionMetadata
from engine.models.kv_scales import calibrate, sample_tokens
from engine.quantization.formats.registry import find_format
from tests.engine.models import make_model

pytestmark = pytest.mark.usefixtures("forced")

FP8 = torch.float8_e4m3fn
#: Each has a scale of its own.
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
KEYS = "model.layers.{}.self_attn.k_proj.weight"
SETTINGS = {"dtype": "float32", "max_model_len": 64, "device": "cpu", "skip_tokenizer_init": True}


@pytest.fixture
def folder(tmp_path):
    """Keys 3000 times as large as usual, which queries make up for: beyond what e4m3 holds."""
    model = make_model("llama", tmp_path, num_hidden_layers=2, **HEADS)
    weights = load_file(model / "model.safetensors")
    for layer in range(2):
        weights[KEYS.format(layer)] *= 3000
        weights[KEYS.format(layer).replace("k_proj", "q_proj")] /= 3000
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


def load(folder, **settings):
    config = EngineConfig(model=str(folder), **SETTINGS, **settings)
    return load_model(config, kernels.get("cpu", use_compiled=config.cpu_kernels), lambda *_: None)


def hidden(model, tokens, dtype):
    count = len(tokens)
    model.allocate_kv(4, 16, dtype)
    context = AttentionMetadata(
        positions=torch.arange(count), slot_mapping=torch.arange(count),
        block_tables=torch.arange(4, dtype=torch.int32)[None],
        seq_lens=torch.tensor([count], dtype=torch.int32),
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
    )  # fmt: skip
    return model.forward(torch.tensor(tokens), context)


def test_measured_scales_save_keys_that_fp8_would_cut_off(folder):
    model = load(folder).model
    tokens = sample_tokens(None, 380, 24)
    exact = hidden(model, tokens, torch.float32)

    def error():
        return float((hidden(model, tokens, FP8) - exact).norm() / exact.norm())

    cut_off = error()
    calibrate(model, None, 64, FP8)
    assert len(model.kv_scales) == 2
    assert model.kv_caches == []
    heads = model.spec.num_kv_heads
    assert all(scales.keys.shape == scales.values.shape == (heads,) for scales in model.kv_scales)
    assert error() < 0.25 < 0.8 < cut_off  # 0.16: what e4m3 costs this model without its large keys
    assert hidden(model, tokens, torch.float32).equal(exact)  # other caches have no scales


def test_scales_of_the_checkpoint_come_first(folder):
    weights = load_file(folder / "model.safetensors")
    prefix = "model.layers.0.self_attn."
    weights[prefix + "k_scale"], weights[prefix + "v_scale"] = (
        torch.tensor(8.0),
        torch.tensor([0.5]),
    )
    weights["model.layers.1.self_attn.k_scale"] = torch.tensor(-1.0)  # a placeholder
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    first, second = load(folder, **settings).model.kv_scales
    assert (first.keys.tolist(), first.values.tolist()) == ([8.0], [0.5])
    assert len(second.keys) > 1
    assert load(folder).model.kv_scales[1] is None


@pytest.mark.parametrize("value", [torch.tensor(0.0), torch.tensor(float("nan")), torch.ones(7)])
def test_scales_that_make_no_sense_are_refused(folder, value, monkeypatch):
    """By the tensor's name, before any layer is read."""
    monkeypatch.setattr(NativeDecoder, "load", None)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.v_scale"] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.self_attn\.v_scale") as raised:
        load(folder)
    assert raised.value.param == "v_scale"


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_scale_that_is_there_alone_is_for_both(folder, name):
    weights = load_file(folder / "model.safetensors")
    weights[f"model.layers.1.self_attn.{name}"] = torch.tensor(0.25)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    first, second = load(folder).model.kv_scales
    assert first is None
    assert (second.keys.tolist(), second.values.tolist()) == ([0.25], [0.25])


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_setting_that_would_do_nothing_is_refused(folder, dtype):
    with pytest.raises(ConfigError, match="calculate_kv_scales") as raised:
        LLM(str(folder), calculate_kv_scales=True, kv_cache_dtype=dtype, **SETTINGS)
    assert raised.value.param == "calculate_kv_scales"


SOUND = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.25, "1": 3}}}


def scale_file(folder, **changes):
    path = folder / "kv_cache_scales.json"
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": {**SOUND, **changes}}))
    return {"kv_cache_dtype": "fp8", "quantization_param_path": str(path)}


def test_scales_of_a_file_are_those_that_the_cache_has(folder):
    """They go before the checkpoint's, and stay when weights are read anew."""
    weights = load_file(folder / "model.safetensors")
    prefix = "model.layers.0.self_attn."
    weights[prefix + "k_scale"], weights[prefix + "v_scale"] = torch.tensor(8.0), torch.tensor(0.5)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = load(folder, **scale_file(folder))
    config = EngineConfig(model=str(folder), **SETTINGS, **scale_file(folder))
    tokens = sample_tokens(None, 380, 24)
    initial = hidden(loaded.model, tokens, FP8)
    for _ in range(2):
        caches = loaded.model.kv_caches
        assert [{*cache.key_scales.tolist()} for cache in caches] == [{0.25}, {3.0}]
        assert [{*cache.value_scales.tolist()} for cache in caches] == [{0.25}, {3.0}]
        reload_model(loaded, config, kernels.get("cpu", use_compiled=config.cpu_kernels))
        assert hidden(loaded.model, tokens, FP8).equal(initial)
    loaded.model.kv_scales = []
    assert not hidden(loaded.model, tokens, FP8).equal(initial)


def test_measured_scales_are_measured_again_when_weights_are_read_anew(folder):
    settings = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    loaded = load(folder, **settings)
    initial_kv_scales = loaded.model.kv_scales
    config = EngineConfig(model=str(folder), **SETTINGS, **settings)
    reload_model(loaded, config, kernels.get("cpu", use_compiled=config.cpu_kernels))
    for old, new in zip(initial_kv_scales, loaded.model.kv_scales, strict=True):
        assert old.keys.equal(new.keys)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float8_e5m2"}, "kv_cache.dtype is 'float8_e5m2'"),
        ({"scaling_factor": None}, "scaling_factor must be an object"),
        ({"scaling_factor": {"0": {"0": 1, "1": 1}, "1": {"0": 1, "1": 1}}}, "2 ranks"),
        ({"scaling_factor": {"0": {"0": 1}}}, "names 1 layers, which aren't 0 to 1"),
        ({"scaling_factor": {"0": {"0": 1, "1": -1}}}, "scaling_factor.0.1 must be a positive"),
        ({"scaling_factor": {"0": {"0": 1, "1": float("nan")}}}, "0.1 must be a positive finite"),
        ({"scaling_factor": {"0": {"0": 1, "1": 1e-60}}}, "0.1 must be a positive finite"),
        ({"scaling_factor": {"0": {"0": 1, "1": 10**400}}}, "0.1 must be a positive finite"),
        ({"scaling_factor": {"0": {"0": 1, "1": True}}}, "0.1 must be a positive finite"),
    ],
)
def test_an_unsound_file_of_scales_names_its_field(folder, changes, words, monkeypatch):
    """Before any weight is read."""
    monkeypatch.delattr(NativeDecoder, "load")
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        load(folder, **scale_file(folder, **changes))
    assert raised.value.param == "quantization_param_path"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "the file must be an object"),
        ("{", "can't be read as JSON"),
        ("[" * 100_000, "can't be read as JSON"),
        (None, "there is no file"),
        (" " * (1 << 20) + "{}", "more than 1048576 bytes"),
        ('{"model_type": "opt"}', "model_type is 'opt', but the model's is 'llama'"),
    ],
)
def test_what_is_no_file_of_scales_is_refused(folder, text, words):
    settings = scale_file(folder)
    if text is None:
        (folder / "kv_cache_scales.json").unlink()
    else:
        (folder / "kv_cache_scales.json").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(folder, **settings)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_dtype": "int8"}, "an int8 KV cache finds a scale for each token"),
        ({}, "set kv_cache_dtype to fp8, not auto"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "not fp8_e5m2"),
        ({"kv_cache_dtype": "fp8", "calculate_kv_scales": True}, "leave calculate_kv_scales out"),
    ],
)
def test_a_file_of_scales_that_nothing_would_use_is_refused(options, words):
    with pytest.raises(ConfigError, match=words) as raised:
        EngineConfig(model="m", quantization_param_path="scales.json", **options)
    assert raised.value.param == "quantization_param_path"


@pytest.mark.parametrize("other", [{"runner": "pooling"}, {"model_impl": "transformers"}])
def test_a_file_of_scales_is_for_the_native_decoder(folder, other):
    with pytest.raises(ConfigError, match="quantization_param_path isn't used for a"):
        load(folder, **scale_file(folder), **other)


def test_a_checkpoint_that_quantizes_its_cache_alone_is_taken():
    scheme = {"num_bits": 8, "type": "float"}
    raw = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    assert find_format(raw) is None
