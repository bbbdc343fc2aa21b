"""The weights as they ship."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaForCausalLM

from demo.styles import STYLES
from demo.train import TEMPERATURE, export
from engine.text.tokenizer_files import read_generation_config, sampling_defaults

MEGABYTE = 1_000_000


def shapes(path: Path) -> dict[str, list[int]]:
    with safe_open(path, "pt") as weights:
        return {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def config(shipped):
    return json.loads((shipped / "config.json").read_text())


def test_the_model_is_small(shipped):
    assert (shipped / "model.safetensors").stat().st_size <= 12 * MEGABYTE


def test_the_model_is_a_llama_with_grouped_queries(config):
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_attention_heads"] > config["num_key_value_heads"]
    assert config["tie_word_embeddings"]
    assert config["max_position_embeddings"] == 2048


def test_the_weights_are_bfloat16_and_finite(shipped):
    with safe_open(shipped / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.bfloat16
            assert tensor.isfinite().all()


def test_the_vocabulary_is_the_tokenizers(config, tokenizer):
    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == tokenizer.eos_token_id


def test_generation_stops_at_the_turns_end_and_at_the_texts(shipped, tokenizer):
    generation = json.loads((shipped / "generation_config.json").read_text())
    ends = ["<|im_end|>", "<|endoftext|>"]
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids(ends)


def test_a_request_that_names_no_temperature_gets_a_low_one(shipped):
    generation = read_generation_config(shipped)
    assert sampling_defaults(generation) == {"temperature": TEMPERATURE}
    assert generation["do_sample"] is True  # or transformers ignores the temperature


def test_an_exported_model_brings_the_same_defaults(shipped, tmp_path):
    model = LlamaForCausalLM.from_pretrained(shipped)
    export(tmp_path, model, AutoTokenizer.from_pretrained(shipped))
    written, shipped_config = read_generation_config(tmp_path), read_generation_config(shipped)
    names = ("do_sample", "temperature", "eos_token_id", "pad_token_id")
    assert [written[name] for name in names] == [shipped_config[name] for name in names]


def test_the_chat_template_ships_with_the_tokenizer(shipped):
    settings = json.loads((shipped / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in settings["chat_template"]


@pytest.mark.parametrize("name", STYLES)
def test_an_adapter_fits_the_model(shipped, adapters, name):
    base = shapes(shipped / "model.safetensors")
    settings = json.loads((adapters / name / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA"
    weights = shapes(adapters / name / "adapter_model.safetensors")
    assert len(weights) == 2 * len(settings["target_modules"]) * 6
    for key, shape in weights.items():
        module, side = key.removeprefix("base_model.model.").removesuffix(".weight").split(".lora_")
        outputs, inputs = base[f"{module}.weight"]
        assert shape == ([settings["r"], inputs] if side == "A" else [outputs, settings["r"]])


@pytest.mark.parametrize("name", STYLES)
def test_an_adapter_is_small_and_knows_no_machine(adapters, name):
    assert (adapters / name / "adapter_model.safetensors").stat().st_size < MEGABYTE
    assert "/" not in (adapters / name / "adapter_config.json").read_text().replace("</", "")
