"""Families of Llama's shape: RMSNorm, rotary embedding, gated MLP."""

from __future__ import annotations

from typing import Any

from engine.contract.errors import BadModelConfig
from engine.layers.rotary import rope_spec
from engine.models.families.family import (
    Config,
    Family,
    head_size,
    rotary_dim,
    window_everywhere,
    windows_by_type,
)
from engine.models.names import WeightNames

FUSED = WeightNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))


def llama(config: Config) -> dict[str, Any]:
    """Llama: biases where the config says so."""
    bias = bool(config.get("attention_bias", False))
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "windows": (0,) * int(config["num_hidden_layers"]),
    }


def mistral(config: Config) -> dict[str, Any]:
    """Mistral: a window on every layer."""
    return {"windows": window_everywhere(config)}


def qwen2(config: Config) -> dict[str, Any]:
    """Qwen 2: biases of queries, keys and values."""
    return {"qkv_bias": bool(config.get("qkv_bias", True)), "windows": qwen_windows(config)}


def qwen3(config: Config) -> dict[str, Any]:
    """Qwen 3: queries and keys are normed by head."""
    return {**llama(config), "qk_norm": "rms_head", "windows": qwen_windows(config)}


def qwen_windows(config: Config) -> tuple[int, ...]:
    """Qwen's windows: by `layer_types`, or on layers from `max_window_layers` on."""
    layers = int(config["num_hidden_layers"])
    if not config.get("use_sliding_window"):
        return (0,) * layers
    if config.get("layer_types"):
        return windows_by_type(config)
    window = int(config.get("sliding_window") or 0)
    first = int(config.get("max_window_layers", layers))
    return tuple(window if layer >= first else 0 for layer in range(layers))


def phi3(config: Config) -> dict[str, Any]:
    """Phi-3: fused projections, LongRoPE."""
    return {"names": FUSED, "windows": window_everywhere(config)}


def granite(config: Config) -> dict[str, Any]:
    """Granite: Llama with four multipliers."""
    return {
        **llama(config),
        "embedding_scale": float(config.get("embedding_multiplier", 1.0)),
        "residual_scale": float(config.get("residual_multiplier", 1.0)),
        "attention_scale": float(config.get("attention_multiplier", 1.0)),
        "logit_scale": 1.0 / float(config.get("logits_scaling", 1.0)),
    }


def smollm3(config: Config) -> dict[str, Any]:
    """SmolLM3: every fourth layer isn't rotated, and it's these that may have a window."""
    layers = int(config["num_hidden_layers"])
    rotated = _rotated_layers(config, layers)
    types = ["full_attention" if turned else "sliding_attention" for turned in rotated]
    rope = rope_spec(config, rotary_dim(config, head_size(config)))
    return {
        **llama(config),
        "layer_ropes": tuple(rope if turned else None for turned in rotated),
        "windows": windows_by_type(config, types)
        if config.get("use_sliding_window")
        else (0,) * layers,
    }


def _rotated_layers(config: Config, layers: int) -> list[bool]:
    """Which layers are rotated. Raises `BadModelConfig` for what doesn't say so of each."""
    given = config.get("no_rope_layers")
    if given is None:
        every = int(config.get("no_rope_layer_interval", 4))
        if every < 1:
            raise BadModelConfig(
                "config.json: no_rope_layer_interval must be at least 1.",
                param="no_rope_layer_interval",
            )
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if not isinstance(given, list) or len(given) < layers or not all(v in (0, 1) for v in given):
        raise BadModelConfig(
            "config.json: no_rope_layers must be a list of 1 (rotated) or 0 for each of "
            f"{layers} layers.",
            param="no_rope_layers",
        )
    return [bool(turned) for turned in given[:layers]]


FAMILIES = {
    "LlamaForCausalLM": Family(llama),
    "MistralForCausalLM": Family(mistral),
    "Qwen2ForCausalLM": Family(qwen2),
    "Qwen3ForCausalLM": Family(qwen3),
    "Phi3ForCausalLM": Family(
        phi3, {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
    ),
    "GraniteForCausalLM": Family(granite),
    "SmolLM3ForCausalLM": Family(
        smollm3, {"rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True}
    ),
}
