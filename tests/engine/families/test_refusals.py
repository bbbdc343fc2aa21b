"""What a config.json asks for and the native decoder doesn't do is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from engine.contract.errors import ConfigError, ModelLoadError
from engine.models.registry import decoder_spec, native_architectures, register_decoder
from engine.models.sharding import ModelShard, check_stages
from kernels.interface import RankGroup

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 384,
    "max_position_embeddings": 512,
}


def config(architecture: str, **changes: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [architecture], **changes}


@pytest.mark.parametrize(
    ("architecture", "changes", "param"),
    [
        ("LlamaForCausalLM", {"hidden_act": "xielu"}, "hidden_act"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "spiral"}}, "rope_type"),
        ("LlamaForCausalLM", {"hidden_size": 0}, "hidden_size"),
        ("Phi3SmallForCausalLM", {"hidden_act": "gelu"}, "hidden_act"),
        ("Phi3SmallForCausalLM", {"blocksparse_block_size": 0}, "blocksparse_block_size"),
        ("Phi3SmallForCausalLM", {"dummy_token_indices": [384]}, "dummy_token_indices"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma2ForCausalLM", {"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, None),
        ("OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("OPTForCausalLM", {"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
        ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}, None),
        ("MptForCausalLM", {"attn_config": {"qk_ln": True}}, "qk_ln"),
        ("MptForCausalLM", {"attn_config": {"alibi": False}}, "alibi"),
        (
            "DeciLMForCausalLM",
            {"num_key_value_heads_per_layer": [4, 3]},
            "num_key_value_heads_per_layer",
        ),
        ("JAISLMHeadModel", {"position_embedding_type": "learned"}, "position_embedding_type"),
        ("MiniCPMForCausalLM", {"num_experts": 8}, "num_experts"),
        ("Olmo3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, "0"]}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ("Glm4ForCausalLM", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("GraniteMoeHybridForCausalLM", {"mamba_n_heads": 3}, "mamba_n_heads"),
        ("GraniteMoeHybridForCausalLM", {"mamba_n_heads": 0}, "mamba_n_heads"),
        ("GraniteMoeHybridForCausalLM", {"mamba_n_groups": 3}, "mamba_n_groups"),
        ("GraniteMoeHybridForCausalLM", {"mamba_d_head": 7}, "mamba_n_heads"),
        ("GraniteMoeHybridForCausalLM", {"hidden_act": "gelu"}, "hidden_act"),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba"]}, "layer_types"),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba", "conv"]}, "layer_types"),
        ("FalconH1ForCausalLM", {"mamba_d_ssm": 100}, "mamba_n_heads"),
        ("FalconH1ForCausalLM", {"ssm_multipliers": [1.0]}, "ssm_multipliers"),
        ("FalconH1ForCausalLM", {"projectors_bias": True}, "projectors_bias"),
        ("JambaForCausalLM", {"attn_layer_period": 0}, "attn_layer_period"),
        ("JambaForCausalLM", {"mamba_dt_rank": 0}, "mamba_dt_rank"),
        ("MambaForCausalLM", {"intermediate_size": 0}, "intermediate_size"),
        ("Mamba2ForCausalLM", {"head_dim": 7}, "mamba_n_heads"),
        ("NemotronHForCausalLM", {"layers_block_type": ["moe"]}, "layers_block_type"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M?"}, "layers_block_type"),
        ("Qwen3NextForCausalLM", {"linear_num_key_heads": 5}, "linear_num_key_heads"),
        ("Qwen3NextForCausalLM", {"linear_key_head_dim": -1}, "linear_key_head_dim"),
        ("Qwen3NextForCausalLM", {"full_attention_interval": 0}, "full_attention_interval"),
        ("Qwen3NextForCausalLM", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("MiniMaxForCausalLM", {"hidden_act": "gelu"}, "hidden_act"),
        ("MiniMaxForCausalLM", {"layer_types": ["mamba"] * 2}, "layer_types"),
        ("MiniMaxText01ForCausalLM", {"postnorm": False}, "postnorm"),
        ("MiniMaxText01ForCausalLM", {"attn_type_list": [0, 2]}, "attn_type_list"),
        ("MiniMaxM1ForCausalLM", {"postnorm": False}, "postnorm"),
        ("KimiLinearForCausalLM", {"mla_use_nope": False}, "mla_use_nope"),
        ("KimiLinearForCausalLM", {"layer_types": ["mamba"] * 2}, "layer_types"),
        ("KimiLinearForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("RecurrentGemmaForCausalLM", {"block_types": ["recurrent", "mlp"]}, "block_types"),
        ("RecurrentGemmaForCausalLM", {"lru_width": 66}, "lru_width"),
        ("RecurrentGemmaForCausalLM", {"hidden_activation": "silu"}, "hidden_act"),
        ("Zamba2ForCausalLM", {"layers_block_type": ["mamba", "moe"]}, "layers_block_type"),
        ("Zamba2ForCausalLM", {"layers_block_type": ["mamba"]}, "layers_block_type"),
        ("Zamba2ForCausalLM", {"use_long_context": True}, "use_long_context"),
        ("Gemma3nForCausalLM", {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ("Gemma3nForCausalLM", {"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
        ("Gemma3nForCausalLM", {"intermediate_size": [96, 64]}, "intermediate_size"),
        (
            "Gemma3nForCausalLM",
            {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.5]},
            "activation_sparsity_pattern",
        ),
        ("ChatGLMModel", {"rmsnorm": False}, "rmsnorm"),
        ("FalconForCausalLM", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        (
            "MixtralForCausalLM",
            {"num_local_experts": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok",
        ),
    ],
)
def test_a_setting_that_is_not_done_is_named(
    architecture: str, changes: dict[str, Any], param: str | None
) -> None:
    name = param or next(iter(changes))
    with pytest.raises(ModelLoadError, match=name) as caught:
        decoder_spec(config(architecture, **changes))
    assert caught.value.param == name


def test_ranks_cannot_share_gates_that_are_chosen_among_all() -> None:
    spec = decoder_spec(config("Gemma3nForCausalLM", num_kv_shared_layers=0))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 .* an MLP of Gemma3n"):
        ModelShard(spec, Mock(spec=RankGroup, size=2, rank=0))


@pytest.mark.parametrize(
    ("part", "reason"), [("cross", "has an encoder"), ("shared", "read the embeddings")]
)
def test_layers_that_read_more_than_the_one_before_are_not_split_into_stages(
    part: str, reason: str
) -> None:
    spec = replace(decoder_spec(config("LlamaForCausalLM")), **{part: Mock()})
    with pytest.raises(ConfigError, match=f"pipeline_parallel_size=2 can't be used: .*{reason}"):
        check_stages(spec, 2)


def test_an_unknown_architecture_names_the_known_ones() -> None:
    with pytest.raises(ModelLoadError, match=r"NoSuchModel.*LlamaForCausalLM"):
        decoder_spec(config("NoSuchModel"))


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ModelLoadError, match="num_attention_heads"):
        decoder_spec({**LLAMA, "num_attention_heads": None})


@pytest.mark.parametrize("value", ["many", [1], {}])
def test_a_size_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM"):
        decoder_spec({**LLAMA, "vocab_size": value})


def test_architectures_can_be_registered_from_outside() -> None:
    register_decoder("MineForCausalLM", lambda config: {"qk_norm": "rms_head"}, {"head_dim": 32})
    spec = decoder_spec(config("MineForCausalLM"))
    assert (spec.qk_norm, spec.head_dim, spec.architecture) == ("rms_head", 32, "MineForCausalLM")
    assert "MineForCausalLM" in native_architectures()


@pytest.mark.parametrize(
    ("named", "used"), [(None, "gelu_tanh"), ("gelu", "gelu_tanh"), ("silu", "silu")]
)
def test_gemmas_gelu_is_its_tanh_form(named: str | None, used: str) -> None:
    assert decoder_spec(config("GemmaForCausalLM", hidden_act=named)).activation == used


def test_smollm3_by_what_its_config_leaves_out() -> None:
    """Published checkpoints list their layers, smaller configs say how often one isn't rotated."""
    baseline = decoder_spec(config("SmolLM3ForCausalLM", num_hidden_layers=8))
    assert [rope is None for rope in baseline.layer_ropes] == ([False] * 3 + [True]) * 2
    assert (baseline.sliding_windows, baseline.tie_embeddings) == ((0,) * 8, True)
    assert {rope.theta for rope in baseline.layer_ropes if rope} == {2e6}
    longer = decoder_spec(config("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 0, 1]))
    assert [rope is None for rope in longer.layer_ropes] == [True, False]
    windowed = config("SmolLM3ForCausalLM", use_sliding_window=True, sliding_window=24)
    assert decoder_spec({**windowed, "no_rope_layers": [0, 1]}).sliding_windows == (24, 0)


def test_olmo3_without_layer_types_has_three_windows_before_a_full_layer() -> None:
    spec = decoder_spec(config("Olmo3ForCausalLM", num_hidden_layers=5))
    assert spec.sliding_windows == (4096, 4096, 4096, 0, 4096)
    assert {rope.theta for rope in spec.layer_ropes if rope} == {5e5}


@pytest.mark.parametrize("named", ["attention", "full_attention"])
@pytest.mark.parametrize("position", ["rope", None, "nope"])
def test_granite4_is_rotated_where_it_says_so(named: str, position: str | None) -> None:
    raw = config("GraniteMoeHybridForCausalLM", num_local_experts=0, layer_types=[named] * 2)
    spec = decoder_spec({**raw, "position_embedding_type": position})
    assert (spec.rope is not None) == (position == "rope")
    assert (spec.intermediate_size, spec.sliding_windows) == (1024, (0, 0))
