"""GLM-4: the checkpoints of 2024 and those of 2025, which have norms after attention and MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.families.family import Config, Family
from engine.models.names import WeightNames

GLM = WeightNames(up=("mlp.gate_up_proj",))
GLM4 = replace(
    GLM, attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm"
)


def glm(config: Config) -> dict[str, Any]:
    """GLM: neighbours are rotated in half of each head; biases of queries, keys and values."""
    return {
        "names": GLM,
        "qkv_bias": bool(config.get("attention_bias", True)),
        "rope_neox": False,
    }


def glm4(config: Config) -> dict[str, Any]:
    """GLM-4-0414: a norm on both sides of attention and MLP."""
    return {**glm(config), "names": GLM4}


_DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
    "eos_token_id": [151329, 151336, 151338],
}

FAMILIES = {
    "GlmForCausalLM": Family(glm, _DEFAULTS),
    "Glm4ForCausalLM": Family(glm4, _DEFAULTS),
}
