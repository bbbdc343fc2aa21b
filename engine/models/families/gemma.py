"""Gemma 1, 2 and 3 (text)."""

from __future__ import annotations

from typing import Any

from engine.layers.rotary import RopeSpec, rope_spec
from engine.models.families.family import (
    Config,
    Family,
    activation_of,
    every_nth_full,
    refuse,
    rotary_dim,
    windows_by_type,
)
from engine.models.names import WeightNames

SANDWICH = WeightNames(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)


def gemma(config: Config) -> dict[str, Any]:
    """Gemma: norms count from 1, embeddings are scaled by the root of their size."""
    refuse(config, use_bidirectional_attention=False)
    bias = bool(config.get("attention_bias", False))
    named = activation_of(config) if config.get("hidden_act") else "gelu_tanh"
    return {
        "norm_offset": 1.0,
        "embedding_scale": float(config["hidden_size"]) ** 0.5,
        # Early checkpoints say "gelu" and mean its tanh form.
        "activation": "gelu_tanh" if named == "gelu" else named,
        "qkv_bias": bias,
        "o_bias": bias,
    }


def gemma2(config: Config) -> dict[str, Any]:
    """Gemma 2: a norm on both sides of attention and MLP, soft caps, every other layer a window."""
    return {
        **gemma(config),
        "names": SANDWICH,
        "attention_scale": float(config["query_pre_attn_scalar"]) ** -0.5,
        "attention_soft_cap": float(config.get("attn_logit_softcapping") or 0.0),
        "logit_soft_cap": float(config.get("final_logit_softcapping") or 0.0),
        "windows": windows_by_type(config, every_nth_full(config, 2)),
    }


def gemma3(config: Config) -> dict[str, Any]:
    """Gemma 3: queries and keys normed by head; windowed layers rotate with a base of their own."""
    pattern = int(config.get("sliding_window_pattern", 6))
    windows = windows_by_type(config, every_nth_full(config, pattern))
    head_dim = int(config["head_dim"])
    dim = rotary_dim(config, head_dim)
    whole = rope_spec(config, dim, "full_attention")
    local = _local_rope(config, dim)
    return {
        **gemma2({**config, "layer_types": None}),
        "qk_norm": "rms_head",
        "windows": windows,
        "rope": whole,
        "layer_ropes": tuple(local if window else whole for window in windows),
    }


def _local_rope(config: Config, dim: int) -> RopeSpec:
    """Rotary embedding of windowed layers; older configs name only its base."""
    found = (config.get("rope_parameters") or {}).get("sliding_attention")
    if found:
        return rope_spec({**config, "rope_scaling": None}, dim, "sliding_attention")
    theta = float(config.get("rope_local_base_freq", 10000.0))
    return RopeSpec(theta, dim, max_position_embeddings=int(config["max_position_embeddings"]))


_SHARED = {"head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256}
_GEMMA2 = {"sliding_window": 4096, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}

FAMILIES = {
    "GemmaForCausalLM": Family(gemma, _SHARED | {"max_position_embeddings": 8192}),
    "Gemma2ForCausalLM": Family(gemma2, _SHARED | _GEMMA2 | {"max_position_embeddings": 8192}),
    "Gemma3ForCausalLM": Family(
        gemma3,
        _SHARED | {"sliding_window": 4096, "rope_theta": 1e6, "max_position_embeddings": 131072},
    ),
}
