"""OLMo 1, 2 and 3."""

from __future__ import annotations

from typing import Any

from engine.layers.rotary import RopeSpec, rope_spec
from engine.models.families.family import (
    Config,
    Family,
    every_nth_full,
    head_size,
    rotary_dim,
    windows_by_type,
)
from engine.models.families.llama import llama
from engine.models.names import WeightNames

#: Norms on what attention and MLP give, none on what they take.
POST_NORM = WeightNames(
    attention_norm="",
    attention_out_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_out_norm="post_feedforward_layernorm",
)


def olmo(config: Config) -> dict[str, Any]:
    """OLMo 1: LayerNorm without weights; queries, keys and values clipped."""
    return {
        **llama(config),
        "norm": "layer",
        "norm_weight": False,
        "norm_eps": 1e-5,
        "clip_qkv": float(config.get("clip_qkv") or 0.0),
    }


def olmo2(config: Config) -> dict[str, Any]:
    """OLMo 2: norms after attention and MLP, and over all queries and all keys."""
    return {**llama(config), "names": POST_NORM, "qk_norm": "rms_full"}


def olmo3(config: Config) -> dict[str, Any]:
    """OLMo 3: three windowed layers, then one that sees everything; only that one's rotary
    embedding is scaled."""
    windows = windows_by_type(config, every_nth_full(config, 4))
    dim = rotary_dim(config, head_size(config))
    whole = rope_spec(config, dim, "full_attention")
    local = _windowed_rope(config, dim, whole)
    return {
        **olmo2(config),
        "windows": windows,
        "rope": whole,
        "layer_ropes": tuple(local if window else whole for window in windows),
    }


def _windowed_rope(config: Config, dim: int, whole: RopeSpec) -> RopeSpec:
    """Rotary embedding of windowed layers; older configs have one base for all layers."""
    if isinstance((config.get("rope_parameters") or {}).get("sliding_attention"), dict):
        return rope_spec({**config, "rope_scaling": None}, dim, "sliding_attention")
    return RopeSpec(whole.theta, dim, max_position_embeddings=whole.max_position_embeddings)


FAMILIES = {
    "OlmoForCausalLM": Family(olmo, {"eos_token_id": 50279}),
    "Olmo2ForCausalLM": Family(olmo2, {"rms_norm_eps": 1e-5, "eos_token_id": 50279}),
    "Olmo3ForCausalLM": Family(
        olmo3,
        {"rms_norm_eps": 1e-5, "eos_token_id": 50279, "rope_theta": 5e5, "sliding_window": 4096},
    ),
}
