"""Whisper's decoder: learned positions, and cross attention in every layer."""

from __future__ import annotations

from typing import Any

from engine.models.decoder_spec import CrossAttentionSpec, WeightNames
from engine.models.families.common import Config, Family, refuse

_NAMES = WeightNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    final_norm="model.decoder.layer_norm",
    lm_head="proj_out",
    layer="model.decoder.layers.{}.",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    o="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
)


def _prepare(config: Config) -> Config:
    """Copy the decoder's sizes to the field names of decoder-only models."""
    return {
        **config,
        "num_hidden_layers": config["decoder_layers"],
        "num_attention_heads": config["decoder_attention_heads"],
        "intermediate_size": config["decoder_ffn_dim"],
        "max_position_embeddings": config["max_target_positions"],
        "rms_norm_eps": 1e-5,
    }


def whisper(config: Config) -> dict[str, Any]:
    """Whisper and models distilled from it."""
    refuse(config, scale_embedding=False)
    return {
        "names": _NAMES,
        "norm": "layer",
        "norm_bias": True,
        "gated": False,
        "qkv_bias": True,
        "key_bias": False,
        "o_bias": True,
        "mlp_bias": True,
        "rope": None,
        "num_positions": int(config["max_target_positions"]),
        "cross": CrossAttentionSpec(length=int(config["max_source_positions"]), key_bias=False),
    }


FAMILIES = {
    "WhisperForConditionalGeneration": Family(
        whisper,
        {
            "d_model": 384,
            "max_source_positions": 1500,
            "max_target_positions": 448,
            "activation_function": "gelu",
            "tie_word_embeddings": True,
        },
        _prepare,
    )
}
