"""Settings of speculation, by vLLM's names."""

from __future__ import annotations

from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.speculative_config import SpeculativeConfig


def test_the_manuals_flags_become_keys() -> None:
    fields = {
        "model": "m",
        "speculative_model": "[ngram]",
        "num_speculative_tokens": 5,
        "ngram_prompt_lookup_max": 4,
        "ngram_prompt_lookup_min": 1,
        "speculative_disable_by_batch_size": 8,
        "num_lookahead_slots": 3,
    }
    config = EngineConfig.from_mapping(fields).speculative_config
    assert config is not None
    assert SpeculativeConfig.from_mapping(config) == SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=5,
        prompt_lookup_max=4,
        prompt_lookup_min=1,
        disable_by_batch_size=8,
    )


def test_a_model_is_a_draft_model() -> None:
    fields = {
        "model": "m",
        "speculative_model": "org/draft",
        "num_speculative_tokens": 5,
        "speculative_max_model_len": 512,
        "speculative_model_quantization": "int8",
        "speculative_draft_tensor_parallel_size": 1,
    }
    config = EngineConfig.from_mapping(fields).speculative_config
    assert config is not None
    assert SpeculativeConfig.from_mapping(config) == SpeculativeConfig(
        method="draft_model",
        model="org/draft",
        num_speculative_tokens=5,
        max_model_len=512,
        quantization="int8",
    )


def test_the_manuals_acceptance_becomes_keys() -> None:
    fields = {
        "model": "m",
        "speculative_model": "[ngram]",
        "spec_decoding_acceptance_method": "typical_acceptance_sampler",
        "typical_acceptance_sampler_posterior_threshold": 0.2,
        "typical_acceptance_sampler_posterior_alpha": 0.5,
    }
    config = EngineConfig.from_mapping(fields).speculative_config
    assert config is not None
    assert SpeculativeConfig.from_mapping(config) == SpeculativeConfig(
        method="ngram",
        acceptance_method="typical_acceptance_sampler",
        posterior_threshold=0.2,
        posterior_alpha=0.5,
    )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_speculative_tokens": 3}, "method is missing"),
        ({"method": "eagle"}, "model must be the folder or hub id of the eagle"),
        ({"method": "eagle3"}, "model must be the folder or hub id of the eagle3"),
        ({"method": "medusa"}, "model must be the folder or hub id of the medusa"),
        ({"method": "mlp_speculator"}, "model must be the folder or hub id of the mlp speculator"),
        ({"method": "ngram", "acceptance_method": "magic"}, "acceptance_method must be one of"),
        ({"method": "ngram", "posterior_threshold": 0}, "posterior_threshold must be above 0"),
        ({"method": "ngram", "posterior_alpha": "0.3"}, "posterior_alpha must be float"),
        ({"method": "ngram", "posterior_alpha": float("nan")}, "posterior_alpha must be in"),
        ({"method": "magic_mtp"}, "must be one of ngram, suffix"),
        ({"method": "mtp", "model": 3}, "model must be str"),
        ({"method": "draft_model"}, "model must be the folder or hub id"),
        ({"method": "suffix", "model": "org/draft"}, "suffix takes no model"),
        ({"model": "org/draft", "quantization": "int3"}, "quantization must be one of"),
        ({"model": "org/draft", "max_model_len": -1}, "max_model_len must be"),
        ({"model": "org/draft", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
        ({"method": "magic"}, "must be one of ngram, suffix"),
        ({"method": ["ngram"]}, "method must be str"),
        ({"method": "draft_model", "model": ["m"]}, "model must be str"),
        ({"method": "ngram", "prompt_lookup_max": "4"}, "prompt_lookup_max must be int"),
        ({"method": "ngram", "num_speculative_tokens": 10**9}, "num_speculative_tokens must be"),
        ({"method": "ngram", "typo": 1}, "there is no typo"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens must be"),
        ({"method": "ngram", "prompt_lookup_min": 9}, "must not be above prompt_lookup_max"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "max_cached_requests"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        EngineConfig(model="m", speculative_config=fields)
    assert caught.value.param == "speculative_config"


@pytest.mark.parametrize("name", ["mtp", "deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp"])
def test_layers_of_the_models_own_need_no_model_and_have_older_names(name: str) -> None:
    config = SpeculativeConfig.from_mapping({"method": name})
    assert (config.method, config.model, config.computes) == ("mtp", "", True)
    other = SpeculativeConfig.from_mapping({"method": name, "model": "org/layers"})
    assert (other.method, other.model) == ("mtp", "org/layers")


def test_a_low_maximum_lowers_the_minimum() -> None:
    config = SpeculativeConfig.from_mapping({"method": "ngram", "prompt_lookup_max": 1})
    assert config.prompt_lookup_min == 1


def test_null_is_what_is_left_out() -> None:
    fields = {
        "method": "ngram", "model": None, "num_speculative_tokens": None, "quantization": None,
        "prompt_lookup_max": None, "disable_by_batch_size": None,
    }  # fmt: skip
    assert SpeculativeConfig.from_mapping(fields) == SpeculativeConfig(method="ngram")
    with pytest.raises(ConfigError, match="method is missing"):
        SpeculativeConfig.from_mapping({"method": None})
