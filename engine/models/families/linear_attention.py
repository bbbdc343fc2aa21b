"""Families of linear attention or short convolutions beside attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.contract.errors import BadModelConfig
from engine.models.decoder_spec import MambaSpec, MoeSpec, WeightNames
from engine.models.families.common import (
    ATTENTION_LAYERS,
    STATE_LAYERS,
    Config,
    Family,
    divisor_field,
    head_size,
    layers_with_state,
    refuse,
    size_field,
)
from engine.models.families.llama import llama
from engine.models.families.moe import mixtral_experts

_LFM2 = WeightNames(
    final_norm="model.embedding_norm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    o="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)


def qwen3_next(config: Config) -> dict[str, Any]:
    """Qwen3-Next: three of four layers by the gated delta rule, the others' attention has gates."""
    refuse(config, hidden_act="silu")
    layers, every = int(config["num_hidden_layers"]), int(config["full_attention_interval"])
    if every < 1:
        raise BadModelConfig(
            "config.json: full_attention_interval must be at least 1.",
            param="full_attention_interval",
        )
    types = [
        ATTENTION_LAYERS[1] if (layer + 1) % every == 0 else STATE_LAYERS[1]
        for layer in range(layers)
    ]
    step, dense = int(config["decoder_sparse_step"]), set(config.get("mlp_only_layers") or ())
    if step < 1:
        raise BadModelConfig(
            "config.json: decoder_sparse_step must be at least 1.", param="decoder_sparse_step"
        )
    moe = MoeSpec(
        num_experts=int(config["num_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
        renormalize=bool(config["norm_topk_prob"]),
        shared_size=int(config["shared_expert_intermediate_size"]),
        shared_gate="mlp.shared_expert_gate",
    )
    return {
        **llama(config),
        "qk_norm": "rms_head",
        "norm_offset": 1.0,
        "attention_output_gate": True,
        "moe": moe if moe.num_experts else None,
        "states": _delta(config, layers_with_state(config, types)),
    }


def minimax(config: Config) -> dict[str, Any]:
    """MiniMax-Text-01: lightning attention, some layers attend; experts everywhere."""
    refuse(config, hidden_act="silu", sliding_window=0)
    layers = int(config["num_hidden_layers"])
    types = [ATTENTION_LAYERS[1], STATE_LAYERS[1]] * (layers // 2 + 1)
    carried = layers_with_state(config, types[:layers], STATE_LAYERS[1:])
    return {
        "moe": replace(mixtral_experts(config), scale=float(config["mlp_beta_factor"])),
        "attention_output_scale": float(config["full_attn_beta_factor"]),
        "normed_residual": tuple(
            float(config[f"{part}_alpha_factor"]) for part in ("full_attn", "linear_attn", "mlp")
        ),
        "states": _lightning(config, carried) if any(carried) else None,
    }


def _lightning(config: Config, layers: tuple[bool, ...]) -> MambaSpec:
    """Head h of H decays by 2^(-8 (h + 1) / H) a token, less in later layers."""
    heads, size = size_field(config, "num_attention_heads"), head_size(config)
    slopes = [2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]
    last = len(layers) - 1 + 1e-5
    factors = [1 - layer / last + 1e-5 for layer in range(len(layers))]
    return MambaSpec(
        kind="lightning",
        layers=layers,
        num_heads=heads,
        num_key_heads=heads,
        value_size=size,
        key_size=size,
        conv_width=1,
        limits=(1.0, 1.0),
        inputs="self_attn.qkv_proj",
        output_gate="self_attn.output_gate",
        output_scale=float(config["linear_attn_beta_factor"]),
        conv="",
        decay="",
        fixed_decays=tuple(tuple(-slope * factor for slope in slopes) for factor in factors),
        rate_bias="",
        skip="",
        gated_norm="self_attn.norm",
        output="self_attn.out_proj",
    )


def lfm2_moe(config: Config) -> dict[str, Any]:
    """LFM2 with experts in all layers but the first ones."""
    refuse(config, use_expert_bias=True)
    layers, dense = int(config["num_hidden_layers"]), int(config["num_dense_layers"])
    moe = MoeSpec(
        num_experts=int(config["num_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        layers=tuple(layer >= dense for layer in range(layers)),
        renormalize=bool(config["norm_topk_prob"]),
        sigmoid=True,
        choice_bias="feed_forward.expert_bias",
        scale=float(config["routed_scaling_factor"]),
        router="feed_forward.gate",
        experts="feed_forward.experts.",
        expert_names=("w1", "w3", "w2"),
    )
    return {**lfm2(config), "moe": moe}


def lfm2(config: Config) -> dict[str, Any]:
    """LFM2: most layers are short convolutions between two gates, the others attend."""
    layers, attending = int(config["num_hidden_layers"]), config.get("full_attn_idxs")
    types = [
        ATTENTION_LAYERS[1] if attending is None or index in attending else "conv"
        for index in range(layers)
    ]
    carried, hidden = layers_with_state(config, types, ("conv",)), int(config["hidden_size"])
    bias = bool(config["conv_bias"])
    states = MambaSpec(
        kind="conv",
        layers=carried,
        num_heads=1,
        num_key_heads=1,
        value_size=hidden,
        key_size=0,
        conv_width=size_field(config, "conv_L_cache"),
        conv_bias=bias,
        bias=bias,
        inputs="conv.in_proj",
        conv="conv.conv",
        decay="",
        rate_bias="",
        skip="",
        gated_norm="",
        output="conv.out_proj",
    )
    return {
        "names": _LFM2,
        "qk_norm": "rms_head",
        "activation": "silu",
        "intermediate_size": _lfm2_mlp_size(config),
        "states": states if any(carried) else None,
    }


def _lfm2_mlp_size(config: Config) -> int:
    """Two thirds of the size that is named, times a factor, rounded up."""
    size = int(config.get("block_ff_dim") or config["intermediate_size"])
    if not config["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    if (factor := config.get("block_ffn_dim_multiplier")) is not None:
        multiple = size_field(config, "block_multiple_of")
        size = -(-int(factor * size) // multiple) * multiple
    return size


def _lfm2_names(config: Config) -> Config:
    """Names that only the first checkpoints have."""
    older = {"theta": "rope_theta", "tie_embedding": "tie_word_embeddings"}
    return {**config, **{new: config[old] for old, new in older.items() if old in config}}


def _delta(config: Config, layers: tuple[bool, ...]) -> MambaSpec | None:
    if not any(layers):
        return None
    heads = size_field(config, "linear_num_value_heads")
    return MambaSpec(
        kind="delta",
        layers=layers,
        num_heads=heads,
        num_key_heads=divisor_field(
            config, "linear_num_key_heads", heads, "linear_num_value_heads"
        ),
        value_size=size_field(config, "linear_value_head_dim"),
        key_size=size_field(config, "linear_key_head_dim"),
        conv_width=size_field(config, "linear_conv_kernel_dim"),
        inputs="linear_attn.in_proj_qkvz",
        dt_proj="linear_attn.in_proj_ba",
        conv="linear_attn.conv1d",
        decay="linear_attn.A_log",
        rate_bias="linear_attn.dt_bias",
        skip="",
        gated_norm="linear_attn.norm",
        norm_before_gate=True,
        output="linear_attn.out_proj",
    )


_LFM2_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "conv_bias": False,
}
FAMILIES = {
    "MiniMaxForCausalLM": Family(
        minimax,
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "full_attn_alpha_factor": 1.0,
            "full_attn_beta_factor": 1.0,
            "linear_attn_alpha_factor": 1.0,
            "linear_attn_beta_factor": 1.0,
            "mlp_alpha_factor": 1.0,
            "mlp_beta_factor": 1.0,
        },
    ),
    "Lfm2MoeForCausalLM": Family(
        lfm2_moe,
        {
            **_LFM2_DEFAULTS,
            "block_auto_adjust_ff_dim": False,
            "use_expert_bias": True,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        _lfm2_names,
    ),
    "Lfm2ForCausalLM": Family(
        lfm2,
        {
            **_LFM2_DEFAULTS,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
        },
        _lfm2_names,
    ),
    "Qwen3NextForCausalLM": Family(
        qwen3_next,
        {
            "head_dim": 256,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.25,
            "full_attention_interval": 4,
            "decoder_sparse_step": 1,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "linear_num_value_heads": 32,
            "linear_num_key_heads": 16,
            "linear_value_head_dim": 128,
            "linear_key_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    ),
}
