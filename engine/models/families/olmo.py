"""OLMo 1 and 2."""

from __future__ import annotations

from typing import Any

from engine.models.families.family import Config, Family
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


FAMILIES = {
    "OlmoForCausalLM": Family(olmo, {"eos_token_id": 50279}),
    "Olmo2ForCausalLM": Family(olmo2, {"rms_norm_eps": 1e-5, "eos_token_id": 50279}),
}
