"""Settings that are put over config.json."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.checkpoints.model_files import apply_overrides
from engine.contract.engine_config import EngineConfig
from engine.models.decoder_spec import DecoderSpec
from engine.models.layers.altup import SparseGate
from engine.models.registry import decoder_spec
from tests.engine.families.test_refusals import config
from tests.survey.recipes import RECIPES
from tests.survey.tiny import Oracle, make_checkpoint

OLD_GEMMA3 = {
    "rope_theta": 1e6,
    "rope_local_base_freq": 12345.0,
    "head_dim": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}
NEW_GEMMA3 = {
    **{name: value for name, value in OLD_GEMMA3.items() if not name.startswith("rope_")},
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 12345.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    },
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
OLD_OLMO3 = {"rope_theta": 3e5, "layer_types": OLD_GEMMA3["layer_types"]}
NEW_OLMO3 = {
    "rope_parameters": {name: {"rope_theta": 3e5} for name in NEW_GEMMA3["rope_parameters"]},
    "layer_types": OLD_GEMMA3["layer_types"],
}


def spec_of(architecture: str, raw: dict[str, Any], **settings: Any) -> DecoderSpec:
    setting = EngineConfig(model="m", **settings)
    return decoder_spec(apply_overrides(config(architecture, **raw), setting))


@pytest.mark.parametrize("raw", [OLD_GEMMA3, NEW_GEMMA3], ids=["old", "new"])
def test_gemma3s_settings_are_those_of_its_full_layers(raw: dict[str, Any]) -> None:
    spec = spec_of("Gemma3ForCausalLM", raw, rope_scaling=LINEAR, rope_theta=5e5)
    local, full = spec.layer_ropes
    assert local is not None
    assert full is not None
    assert (local.theta, local.kind) == (12345.0, "default")
    assert (full.theta, full.kind, full.params["factor"]) == (5e5, "linear", 4.0)


@pytest.mark.parametrize("raw", [OLD_OLMO3, NEW_OLMO3], ids=["old", "new"])
@pytest.mark.parametrize("by_setting", [False, True])
def test_olmo3s_scaling_is_that_of_its_full_layers(raw: dict[str, Any], by_setting: bool) -> None:
    settings = {"rope_scaling": LINEAR} if by_setting else {}
    written = {} if by_setting else {"rope_scaling": LINEAR}
    spec = spec_of("Olmo3ForCausalLM", raw | written, **settings)
    local, full = spec.layer_ropes
    assert local is not None
    assert full is not None
    assert (local.theta, local.kind) == (3e5, "default")
    assert (full.theta, full.kind, full.params["factor"]) == (3e5, "linear", 4.0)


@pytest.mark.parametrize("raw", [OLD_GEMMA3, NEW_GEMMA3], ids=["old", "new"])
def test_a_scaling_keeps_the_base(raw: dict[str, Any]) -> None:
    rope = spec_of("Gemma3ForCausalLM", raw, rope_scaling={"type": "linear", "factor": 2.0}).rope
    assert rope is not None
    assert (rope.theta, rope.kind) == (1e6, "linear")


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_theta": 1e4, "rope_scaling": LINEAR},
        {"rope_parameters": {"rope_theta": 1e4, **LINEAR}},
    ],
)
def test_a_base_keeps_the_scaling(raw: dict[str, Any]) -> None:
    rope = spec_of("LlamaForCausalLM", raw, rope_theta=2e4).rope
    assert rope is not None
    assert (rope.theta, rope.kind, rope.params["factor"]) == (2e4, "linear", 4.0)


def test_how_much_of_a_head_is_rotated_stays() -> None:
    raw = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
    rope = spec_of("LlamaForCausalLM", raw, rope_scaling=LINEAR).rope
    assert rope is not None
    assert rope.dim == 8


def test_of_a_model_with_several_parts_the_text_part_is_rotated() -> None:
    """What is no scaling stays, such as which of three positions rotates what."""
    setting = EngineConfig(model="m", rope_scaling=LINEAR, rope_theta=2e4)
    for stored in (
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e4},
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
    ):
        raw = config("Qwen2ForCausalLM", head_dim=16, **stored)
        larger = apply_overrides({"model_type": "qwen2_vl", "text_config": raw}, setting)
        rope = decoder_spec(larger["text_config"]).rope
        assert rope is not None
        assert (rope.theta, rope.kind, rope.params["factor"]) == (2e4, "linear", 4.0)
        assert rope.planes


def test_what_a_model_has_once_is_not_its_text_parts() -> None:
    text = config("Gemma3nForCausalLM", **RECIPES["gemma3n"], eos_token_id=1)
    larger = {
        "architectures": text["architectures"], "text_config": text, "eos_token_id": [1, 106],
    }  # fmt: skip
    assert decoder_spec(larger).eos_token_ids == (1, 106)


def test_hf_overrides_reach_into_objects() -> None:
    raw = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    overrides = {"rope_parameters": {"rope_theta": 3e4}, "num_hidden_layers": 5}
    spec = spec_of("LlamaForCausalLM", raw, hf_overrides=overrides)
    assert spec.num_layers == 5
    assert spec.rope is not None
    assert spec.rope.theta == 3e4


def test_nothing_changes_without_settings() -> None:
    raw = config("LlamaForCausalLM", rope_scaling=LINEAR)
    assert apply_overrides(raw, EngineConfig(model="m")) == raw


def test_the_text_part_of_gemma3n_is_loaded_by_its_own_name(tmp_path: Path) -> None:
    """Out of a model that sees and hears, with the text part's config and weights inside."""
    make_checkpoint({**RECIPES["gemma3n"], "tie_word_embeddings": True}, tmp_path)
    oracle = Oracle(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    larger = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(larger))
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1): weights[name] for name in weights
    }
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(
        str(tmp_path), dtype="float32", num_gpu_blocks_override=40, max_model_len=64,
        hf_overrides={"architectures": ["Gemma3nForCausalLM"]},
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (output,) = llm.generate([[5, 9, 7, 60]], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == oracle.greedy([5, 9, 7, 60], 4)


def test_of_no_rows_a_sparse_gate_makes_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SparseGate(0.95)(torch.empty(0, 8)).shape == (0, 8)
