"""Tiny configurations of architectures that run through the Transformers bridge."""

from __future__ import annotations

from typing import Any

from tests.survey.recipes import LATENTS, recipe

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_WINDOWED = ["sliding_attention", "full_attention"]
_LINEAR_FULL = ["linear_attention", "full_attention"]


def _decoder(model_type: str, **options: Any) -> dict[str, Any]:
    """The decoder of an encoder-decoder model, without its encoder."""
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 96))
    }
    return {
        "model_type": model_type,
        "vocab_size": 384,
        "d_model": 64,
        "max_position_embeddings": 512,
        "init_std": 0.3,
        "is_encoder_decoder": False,
        **sides,
        **options,
    }


#: Attention over pages.
BRIDGED: dict[str, dict[str, Any]] = {
    "afmoe": recipe("afmoe", **_EXPERTS, head_dim=16, num_dense_layers=1, sliding_window=24),
    "apertus": recipe("apertus"),
    "arcee": recipe("arcee"),
    "axk1": recipe("axk1", **LATENTS, **_ROUTED),
    "bert": recipe("bert", is_decoder=True),
    "biogpt": recipe("biogpt"),
    "bitnet": recipe("bitnet"),
    "cohere2_moe": recipe("cohere2_moe", **_EXPERTS),
    "ctrl": {
        "model_type": "ctrl",
        "vocab_size": 384,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "dff": 96,
        "n_positions": 512,
    },
    "cwm": recipe("cwm", head_dim=16, sliding_window=24, layer_types=_WINDOWED),
    "diffllama": recipe("diffllama"),
    "dots1": recipe("dots1", **_ROUTED, sliding_window=24, layer_types=_WINDOWED),
    "ernie4_5": recipe("ernie4_5", head_dim=16),
    "ernie4_5_moe": recipe(
        "ernie4_5_moe",
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=32,
        moe_layer_start_index=1,
    ),
    "exaone4": recipe("exaone4", sliding_window=24, layer_types=_WINDOWED),
    "exaone_moe": recipe("exaone_moe", **_EXPERTS, n_group=1, topk_group=1),
    "flex_olmo": recipe("flex_olmo", num_experts=4, num_experts_per_tok=2),
    "gemma4_unified_text": recipe(
        "gemma4_unified_text", head_dim=16, sliding_window=24, layer_types=_WINDOWED
    ),
    "glm4_moe-groups": recipe("glm4_moe", **_ROUTED, head_dim=16),
    "granite_swa": recipe("granite_swa", sliding_window=24, layer_types=_WINDOWED),
    "granitemoe_swa": recipe(
        "granitemoe_swa", num_local_experts=4, sliding_window=24, layer_types=_WINDOWED
    ),
    "granitemoeshared": recipe(
        "granitemoeshared", num_local_experts=4, shared_intermediate_size=32
    ),
    "helium": recipe("helium", head_dim=16),
    "hunyuan_v1_dense": recipe("hunyuan_v1_dense", head_dim=16),
    "hunyuan_v1_moe": recipe("hunyuan_v1_moe", head_dim=16, num_experts=4, moe_topk=2),
    "hyperclovax": recipe("hyperclovax"),
    "jais2": recipe("jais2"),
    "jetmoe": recipe("jetmoe", kv_channels=16, num_local_experts=4, num_experts_per_tok=2),
    "laguna": recipe("laguna", **_EXPERTS, head_dim=16),
    "llama4_text": recipe(
        "llama4_text",
        head_dim=16,
        num_local_experts=4,
        intermediate_size_mlp=96,
        no_rope_layers=[1, 0],
    ),
    "mellum": recipe("mellum", **_EXPERTS, head_dim=16),
    "mimo_v2_flash": recipe("mimo_v2_flash", **_ROUTED, head_dim=16, v_head_dim=12),
    "minimax_m2": recipe("minimax_m2", num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "ministral": recipe("ministral", head_dim=16, sliding_window=24, layer_types=_WINDOWED),
    "ministral3": recipe("ministral3", head_dim=16),
    "modernbert-decoder": recipe("modernbert-decoder", local_attention=24),
    "nanochat": recipe("nanochat"),
    "nemotron": recipe("nemotron"),
    "persimmon": recipe("persimmon"),
    "phimoe": recipe("phimoe", num_local_experts=4),
    "seed_oss": recipe("seed_oss", head_dim=16),
    "solar_open": recipe("solar_open", **_ROUTED, head_dim=16),
    "vaultgemma": recipe("vaultgemma", head_dim=16, sliding_window=24, layer_types=_WINDOWED),
}

#: Native architectures with a setting that only the bridge does.
BRIDGED |= {
    "opt-350m": recipe(
        "opt",
        ffn_dim=96,
        word_embed_proj_dim=32,
        do_layer_norm_before=False,
        init_std=0.3,
    ),
    "gpt2-by-layer": {
        "model_type": "gpt2",
        "vocab_size": 384,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        "scale_attn_by_inverse_layer_idx": True,
    },
}

#: A state for each sequence, beside pages or alone.
STATEFUL: dict[str, dict[str, Any]] = {
    "falcon_mamba": recipe("falcon_mamba", state_size=8),
    "nemotron_h-moe": recipe(
        "nemotron_h",
        num_hidden_layers=4,
        layers_block_type=["mamba", "attention", "mlp", "moe"],
        head_dim=16,
        n_routed_experts=4,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        num_experts_per_tok=2,
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=16,
    ),
    "olmo_hybrid": recipe("olmo_hybrid", **_DELTA, layer_types=_LINEAR_FULL),
    "qwen3_5_text": recipe("qwen3_5_text", **_DELTA, head_dim=16, layer_types=_LINEAR_FULL),
}

#: What the bridge refuses, each with its reason.
REFUSED: dict[str, dict[str, Any]] = {
    "bart": _decoder("bart"),
    "roberta": recipe("roberta", is_decoder=True),
    "axk2": recipe("axk2", **LATENTS, **_ROUTED),
    "codegen": {
        "model_type": "codegen",
        "vocab_size": 384,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "rotary_dim": 8,
        "n_positions": 512,
    },
    "doge": recipe("doge"),
    "openai-gpt": {
        "model_type": "openai-gpt",
        "vocab_size": 384,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
    },
    "rwkv": {
        "model_type": "rwkv",
        "vocab_size": 384,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "attention_hidden_size": 64,
        "intermediate_size": 96,
        "context_length": 512,
    },
    "xglm": {
        "model_type": "xglm",
        "vocab_size": 384,
        "d_model": 64,
        "num_layers": 2,
        "attention_heads": 4,
        "ffn_dim": 96,
        "max_position_embeddings": 512,
    },
    "xlstm": recipe("xlstm", num_heads=4),
}

#: Native architectures that go through the bridge too: both must say what `transformers` says.
CROSS_CHECKED = ("llama", "gemma2", "phi3-longrope", "cohere2", "gpt_neox", "qwen2_moe", "gpt_oss")
