"""LFM2: attention and short convolutions."""

from __future__ import annotations

from typing import Any

from engine.models.decoder_spec import MambaSpec, MoeSpec, WeightNames
from engine.models.families.common import (
    ATTENTION_LAYERS,
    Config,
    Family,
    layers_with_state,
    refuse,
    size_field,
)

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


def lfm2_moe(config: Config) -> dict[str, Any]:
    """LFM2 with experts on all layers except the first `num_dense_layers`."""
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
    """LFM2: most layers are short convolutions between two gates, the others have attention."""
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
        conv=("conv.conv",),
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
    """Return the MLP's size: with `block_auto_adjust_ff_dim` two thirds of the config's size, times
    `block_ffn_dim_multiplier`, rounded up to `block_multiple_of`.
    """
    size = int(config.get("block_ff_dim") or config["intermediate_size"])
    if not config["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    if (factor := config.get("block_ffn_dim_multiplier")) is not None:
        multiple = size_field(config, "block_multiple_of")
        size = -(-int(factor * size) // multiple) * multiple
    return size


def _lfm2_names(config: Config) -> Config:
    """Rename fields of the first checkpoints."""
    older = {"theta": "rope_theta", "tie_embedding": "tie_word_embeddings"}
    return {**config, **{new: config[old] for old, new in older.items() if old in config}}


_LFM2_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "conv_bias": False,
}

FAMILIES = {
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
}
