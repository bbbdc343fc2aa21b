"""Tiny configurations of the architectures that `transformers` can make."""

from __future__ import annotations

from typing import Any

VOCAB = 384
MAX_POSITIONS = 512
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
}
_GPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": MAX_POSITIONS,
}
#: What all are made with: ids inside the vocabulary, and weights so large that random logits lie
#: far apart and greedy choices aren't ties.
COMMON: dict[str, Any] = {
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "initializer_range": 0.3,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
#: Attention over latents.
LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_BEHIND_PLAIN = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}
_HALF_FULL = ["sliding_attention", "full_attention"]
_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}


def recipe(model_type: str, **options: Any) -> dict[str, Any]:
    """A tiny config of this type."""
    return {"model_type": model_type, **_SHAPE, **options}


def _short_factors(count: int) -> dict[str, Any]:
    """LongRoPE's lists of factors, one for each frequency."""
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(count)],
        "long_factor": [2.0 + 0.2 * i for i in range(count)],
    }


#: name -> what makes its config. The first of an architecture is its plain form.
RECIPES: dict[str, dict[str, Any]] = {
    "llama": recipe("llama"),
    "mistral": recipe("mistral", sliding_window=24, head_dim=32),
    "qwen2": recipe("qwen2"),
    "qwen3": recipe("qwen3", head_dim=32),
    "gemma": recipe("gemma", head_dim=32),
    "gemma2": recipe(
        "gemma2",
        head_dim=32,
        num_hidden_layers=3,
        sliding_window=24,
        query_pre_attn_scalar=24,
        tie_word_embeddings=False,
    ),
    "gemma3": recipe(
        "gemma3_text",
        head_dim=32,
        num_hidden_layers=3,
        sliding_window=24,
        query_pre_attn_scalar=24,
        tie_word_embeddings=False,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": recipe("phi3"),
    "phi3-longrope": recipe(
        "phi3",
        rope_parameters={**_short_factors(6), "partial_rotary_factor": 0.75},
        original_max_position_embeddings=256,
        sliding_window=40,
    ),
    "stablelm": recipe("stablelm"),
    "stablelm-parallel": recipe(
        "stablelm", use_qkv_bias=True, use_parallel_residual=True, qk_layernorm=True
    ),
    "olmo": recipe("olmo", clip_qkv=2.0),
    "olmo2": recipe("olmo2"),
    "olmo3": recipe(
        "olmo3",
        sliding_window=24,
        layer_types=_HALF_FULL,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
            "full_attention": {**_YARN, "rope_theta": 500000.0},
        },
    ),
    "cohere": recipe("cohere", use_qk_norm=True, attention_bias=True),
    "cohere2": recipe("cohere2", sliding_window=24, layer_types=_HALF_FULL),
    "granite": recipe(
        "granite",
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.1,
        logits_scaling=2.0,
    ),
    "granite4-dense": recipe(
        "granitemoehybrid",
        layer_types=["full_attention"] * 2,
        num_local_experts=0,
        shared_intermediate_size=80,
        position_embedding_type="rope",
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.1,
        logits_scaling=2.0,
    ),
    "granite4": recipe(
        "granitemoehybrid",
        **_MAMBA2,
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=4,
        intermediate_size=32,
        shared_intermediate_size=48,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.1,
        logits_scaling=2.0,
    ),
    "granite4-groups": recipe(
        "granitemoehybrid",
        **{**_MAMBA2, "mamba_n_groups": 2},
        layer_types=["mamba", "attention"],
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        num_local_experts=0,
        shared_intermediate_size=80,
    ),
    "qwen3_next": recipe(
        "qwen3_next",
        **_DELTA,
        **_EXPERTS,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        head_dim=16,
        shared_expert_intermediate_size=40,
    ),
    "bamba": recipe(
        "bamba",
        **{**_MAMBA2, "mamba_n_groups": 2},
        num_hidden_layers=3,
        attn_layer_indices=[1],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "minimax": recipe(
        "minimax",
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=6,
        num_experts_per_tok=2,
        block_size=16,
        full_attn_alpha_factor=3.5,
        full_attn_beta_factor=0.8,
        linear_attn_alpha_factor=3.6,
        linear_attn_beta_factor=0.9,
        mlp_alpha_factor=3.4,
        mlp_beta_factor=0.7,
    ),
    "lfm2": recipe(
        "lfm2",
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        block_multiple_of=16,
    ),
    "lfm2-biases": recipe(
        "lfm2",
        layer_types=["conv", "full_attention"],
        conv_bias=True,
        conv_L_cache=4,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
    ),
    "lfm2_moe": recipe(
        "lfm2_moe",
        **_EXPERTS,
        num_hidden_layers=3,
        num_dense_layers=1,
        layer_types=["conv", "full_attention", "conv"],
    ),
    "falcon_h1": recipe(
        "falcon_h1",
        **_MAMBA2,
        mamba_d_ssm=128,
        head_dim=16,
        embedding_multiplier=1.5,
        lm_head_multiplier=0.5,
        mlp_multipliers=[0.7, 1.3],
        key_multiplier=0.6,
        attention_in_multiplier=1.2,
        attention_out_multiplier=0.8,
        ssm_in_multiplier=1.1,
        ssm_out_multiplier=0.9,
        ssm_multipliers=[0.9, 1.1, 1.2, 0.8, 1.3],
    ),
    "falcon_h1-norm": recipe(
        "falcon_h1",
        **{**_MAMBA2, "mamba_n_groups": 2},
        mamba_d_ssm=128,
        mamba_rms_norm=True,
        mamba_conv_bias=False,
    ),
    "jamba": recipe(
        "jamba",
        num_hidden_layers=4,
        num_experts=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=3,
        mamba_d_state=4,
        mamba_dt_rank=8,
    ),
    "mamba": recipe("mamba", state_size=8),
    "mamba-biases": recipe("mamba", state_size=8, use_bias=True, use_conv_bias=False),
    "mamba2": recipe(
        "mamba2", state_size=8, num_heads=4, head_dim=32, n_groups=2, chunk_size=16, use_bias=True
    ),
    "nemotron_h": recipe(
        "nemotron_h",
        num_hidden_layers=4,
        layers_block_type=["mamba", "attention", "mlp", "mamba"],
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
    ),
    "smollm3": recipe(
        "smollm3",
        num_hidden_layers=3,
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=24,
    ),
    "glm": recipe("glm", head_dim=32),
    "glm4": recipe("glm4", head_dim=32),
    "starcoder2": recipe("starcoder2", sliding_window=24),
    "phi": recipe("phi"),
    "phi-qk-norm": recipe("phi", qk_layernorm=True),
    "gpt_neox": recipe("gpt_neox"),
    "gpt_neox-sequential": recipe("gpt_neox", use_parallel_residual=False),
    "gptj": {"model_type": "gptj", **_GPT, "rotary_dim": 8},
    "falcon": recipe("falcon"),
    "falcon-new": recipe("falcon", new_decoder_architecture=True, num_kv_heads=2),
    "falcon-alibi": recipe("falcon", alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "gpt2": {"model_type": "gpt2", **_GPT},
    "gpt_neo": {
        "model_type": "gpt_neo",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 24,
        "max_position_embeddings": MAX_POSITIONS,
    },
    "gpt_bigcode": {"model_type": "gpt_bigcode", **_GPT},
    "gpt_bigcode-mha": {"model_type": "gpt_bigcode", **_GPT, "multi_query": False},
    "opt": recipe("opt", ffn_dim=96, word_embed_proj_dim=64, init_std=0.3),
    "bloom": {
        "model_type": "bloom",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 4,
    },
    "mpt": {
        "model_type": "mpt",
        "vocab_size": VOCAB,
        "d_model": 48,
        "n_layers": 2,
        "n_heads": 6,
        "max_seq_len": MAX_POSITIONS,
        "attn_config": {"clip_qkv": 2.0},
    },
    "mixtral": recipe("mixtral", num_local_experts=4),
    "qwen2_moe": recipe(
        "qwen2_moe",
        **_EXPERTS,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[0],
        num_hidden_layers=3,
    ),
    "qwen3_moe": recipe("qwen3_moe", **_EXPERTS, head_dim=32, norm_topk_prob=True),
    "olmoe": recipe("olmoe", num_experts=6, num_experts_per_tok=2, clip_qkv=2.0),
    "granitemoe": recipe("granitemoe", num_local_experts=4, residual_multiplier=0.4),
    "glm4_moe": recipe(
        "glm4_moe",
        num_hidden_layers=3,
        head_dim=32,
        use_qk_norm=True,
        attention_bias=True,
        n_routed_experts=6,
        n_shared_experts=2,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        routed_scaling_factor=2.5,
    ),
    "deepseek_v2-lite": recipe(
        "deepseek_v2",
        **{**LATENTS, "q_lora_rank": None},
        **_BEHIND_PLAIN,
        rope_parameters={**_YARN, "rope_theta": 10000.0, "mscale": 0.9, "mscale_all_dim": 0.7},
    ),
    "deepseek_v2": recipe(
        "deepseek_v2",
        **LATENTS,
        **_BEHIND_PLAIN,
        attention_bias=True,
        routed_scaling_factor=2.5,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
    ),
    "deepseek_v3": recipe(
        "deepseek_v3",
        **LATENTS,
        **_BEHIND_PLAIN,
        n_group=4,
        topk_group=2,
        rope_parameters={**_YARN, "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek_v3-halves": recipe(
        "deepseek_v3",
        **{**LATENTS, "q_lora_rank": None},
        **_BEHIND_PLAIN,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        rope_interleave=False,
    ),
    "glm4_moe_lite": recipe("glm4_moe_lite", **LATENTS, **_BEHIND_PLAIN, n_group=2),
    "minicpm3": recipe("minicpm3", **LATENTS, dim_model_base=32),
    "youtu": recipe("youtu", **LATENTS, attention_bias=True, tie_word_embeddings=False),
    "dbrx": {
        "model_type": "dbrx",
        "vocab_size": VOCAB,
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": MAX_POSITIONS,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gpt_oss": recipe(
        "gpt_oss",
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
        swiglu_limit=2.0,
        layer_types=_HALF_FULL,
        rope_parameters={**_YARN, "rope_theta": 150000.0, "truncate": False},
    ),
}
