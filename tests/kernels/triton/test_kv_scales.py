"""Scales of fp8 KV caches: from the checkpoint, or measured; on the Triton kernels."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

import kernels
from engine import LLM
from engine.contract.config import EngineConfig
from engine.contract.errors import ConfigError, ModelLoadError
from engine.model_loader.loader import load_model
from engine.models.context import AttentionContext
from engine.models.kv_scales import calibrate, sample_tokens
from engine.quantization.checkpoint.registry import find_format
from tests.engine.models import make_model

FP8 = torch.float8_e4m3fn
KEYS = "model.layers.{}.self_attn.k_proj.weight"
SETTINGS = {"dtype": "float32", "max_model_len": 64, "device": "cpu", "skip_tokenizer_init": True}


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    monkeypatch.setenv(kernels.FORCED, "triton")


@pytest.fixture
def folder(tmp_path):
    """Keys 3000 times as large as usual, which queries make up for: beyond what e4m3 holds."""
    made = make_model("llama", tmp_path, num_hidden_layers=2)
    weights = load_file(made / "model.safetensors")
    for layer in range(2):
        weights[KEYS.format(layer)] *= 3000
        weights[KEYS.format(layer).replace("k_proj", "q_proj")] /= 3000
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


def load(folder, **settings):
    config = EngineConfig(model=str(folder), **SETTINGS, **settings)
    return load_model(config, kernels.get("cpu", use_compiled=config.cpu_kernels), lambda *_: None)


def hidden(model, tokens, dtype):
    count = len(tokens)
    model.allocate_kv(4, 16, dtype)
    context = AttentionContext(
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
    at = "model.layers.0.self_attn."
    weights[at + "k_scale"], weights[at + "v_scale"] = torch.tensor(8.0), torch.tensor([0.5])
    weights["model.layers.1.self_attn.k_scale"] = torch.tensor(-1.0)  # a placeholder
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    first, second = load(folder, **settings).model.kv_scales
    assert (first.keys.tolist(), first.values.tolist()) == ([8.0], [0.5])
    assert len(second.keys) > 1
    assert load(folder).model.kv_scales[1] is None


@pytest.mark.parametrize("value", [torch.tensor(0.0), torch.tensor(float("nan")), torch.ones(7)])
def test_scales_that_make_no_sense_are_refused(folder, value):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.v_scale"] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="v_scale"):
        load(folder)


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_setting_that_would_do_nothing_is_refused(folder, dtype):
    with pytest.raises(ConfigError, match="calculate_kv_scales") as raised:
        LLM(str(folder), calculate_kv_scales=True, kv_cache_dtype=dtype, **SETTINGS)
    assert raised.value.param == "calculate_kv_scales"


def test_a_checkpoint_that_quantises_its_cache_alone_is_taken():
    scheme = {"num_bits": 8, "type": "float"}
    raw = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    assert find_format(raw) is None
