"""Families with LayerNorm and rotary embedding."""

from __future__ import annotations

from typing import Any

from engine.contract.errors import ModelLoadError
from engine.models.decoder_spec import WeightNames
from engine.models.families.common import (
    Config,
    Family,
    every_nth_full,
    rotary_dim,
    window_everywhere,
    windows_by_type,
)
from engine.models.families.llama import llama
from engine.models.rotary_embedding import rope_spec

PHI = WeightNames(
    final_norm="model.final_layernorm",
    mlp_norm="",
    o="self_attn.dense",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    up=("mlp.fc1",),
    down="mlp.fc2",
)


def stablelm(config: Config) -> dict[str, Any]:
    """StableLM: a quarter of each head is rotated; optionally attention and MLP in parallel."""
    parallel = bool(config.get("use_parallel_residual", False))
    normed = bool(config.get("qk_layernorm", False))
    return {
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": bool(config.get("use_qkv_bias", False)),
        "wiring": "parallel" if parallel else "sequential",
        "qk_norm": "layer_list" if normed else "",
        "names": WeightNames(
            mlp_norm="" if parallel else "post_attention_layernorm",
            q_norm="self_attn.q_layernorm",
            k_norm="self_attn.k_layernorm",
        ),
    }


def cohere(config: Config) -> dict[str, Any]:
    """Command-R: attention and MLP in parallel, LayerNorm without bias, interleaved rotation,
    scaled logits.
    """
    return {
        **llama(config),
        "wiring": "parallel",
        "names": WeightNames(mlp_norm=""),
        "norm": "layer",
        "rope_neox": False,
        "logit_scale": float(config["logit_scale"]),
        "qk_norm": "layer_heads" if config.get("use_qk_norm") else "",
    }


def cohere2(config: Config) -> dict[str, Any]:
    """Command-R7B: by default every fourth layer has full attention without rotary embedding, the
    others have a sliding window.
    """
    pattern = int(config.get("sliding_window_pattern", 4))
    windows = windows_by_type(config, every_nth_full(config, pattern))
    head_dim = int(config["hidden_size"]) // int(config["num_attention_heads"])
    rope = rope_spec(config, rotary_dim(config, head_dim))
    return {
        **cohere({**config, "use_qk_norm": False}),
        "sliding_windows": windows,
        "layer_ropes": tuple(rope if window else None for window in windows),
    }


def starcoder2(config: Config) -> dict[str, Any]:
    """StarCoder 2: an ungated MLP, biases in all layers."""
    bias = bool(config.get("use_bias", True))
    return {
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "gated": False,
        "names": WeightNames(up=("mlp.c_fc",), down="mlp.c_proj"),
        "sliding_windows": window_everywhere(config),
    }


def phi(config: Config) -> dict[str, Any]:
    """Phi 1 and 2: attention and MLP in parallel, by default half of each head is rotated, biases
    in all linear layers.
    """
    normed = bool(config.get("qk_layernorm", False))
    return {
        "wiring": "parallel",
        "names": PHI,
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "lm_head_bias": True,
        "gated": False,
        "qk_norm": "layer_shared" if normed else "",
        "qk_norm_bias": normed,
    }


def gpt_neox(config: Config) -> dict[str, Any]:
    """GPT-NeoX and Pythia: queries, keys and values fused by head; attention and MLP in parallel,
    each with a norm.
    """
    bias = bool(config.get("attention_bias", True))
    return {
        "wiring": "parallel" if config.get("use_parallel_residual", True) else "sequential",
        "names": WeightNames(
            embedding="gpt_neox.embed_in",
            final_norm="gpt_neox.final_layer_norm",
            lm_head="embed_out",
            layer="gpt_neox.layers.{}.",
            qkv=("attention.query_key_value",),
            o="attention.dense",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
        ),
        "num_kv_heads": int(config["num_attention_heads"]),
        "norm": "layer",
        "norm_bias": True,
        "qkv_layout": "grouped",
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": True,
        "gated": False,
    }


def falcon(config: Config) -> dict[str, Any]:
    """Falcon 7B (one KV head), 40B (grouped KV heads) and RW (ALiBi)."""
    from engine.models.families.gpt import falcon_alibi

    new, parallel = bool(config["new_decoder_architecture"]), bool(config["parallel_attn"])
    norms = config.get("num_ln_in_parallel_attn") or (2 if new else 1)
    if (new and not parallel) or (norms == 2 and not new):
        raise ModelLoadError(
            "config.json: this mix of new_decoder_architecture, parallel_attn and "
            "num_ln_in_parallel_attn isn't supported.",
            param="num_ln_in_parallel_attn",
        )
    heads = int(config["num_attention_heads"])
    one = bool(config["multi_query"]) and not new
    two_norms = norms == 2
    bias = bool(config["bias"])
    return {
        "wiring": "parallel" if parallel else "sequential",
        "names": WeightNames(
            optional_prefix="transformer.",
            embedding="transformer.word_embeddings",
            final_norm="transformer.ln_f",
            layer="transformer.h.{}.",
            attention_norm="ln_attn" if two_norms else "input_layernorm",
            mlp_norm="ln_mlp" if two_norms else "" if parallel else "post_attention_layernorm",
            qkv=("self_attention.query_key_value",),
            o="self_attention.dense",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
        ),
        "intermediate_size": int(config.get("ffn_hidden_size") or 4 * config["hidden_size"]),
        "num_kv_heads": 1 if one else int(config.get("num_kv_heads") or heads),
        "qkv_layout": "stacked" if one else "grouped",
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "gated": False,
        **(falcon_alibi(config) if config["alibi"] else {}),
    }


_EPS = {"rms_norm_eps": 1e-5}
_COHERE = {**_EPS, "logit_scale": 0.0625, "tie_word_embeddings": True, "rope_theta": 500000.0}

_FALCON = {
    **_EPS,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "multi_query": True,
    "parallel_attn": True,
    "alibi": False,
    "bias": False,
    "new_decoder_architecture": False,
}


def _refined_web(config: Config) -> Config:
    """Convert configs from before `transformers` had Falcon, where several KV heads mean the new
    decoder architecture.
    """
    groups = config.get("n_head_kv")
    if groups is None:
        return dict(config)
    return {**config, "num_kv_heads": groups, "new_decoder_architecture": groups != 1}


FAMILIES = {
    "StableLmForCausalLM": Family(stablelm, {**_EPS, "partial_rotary_factor": 0.25}),
    "CohereForCausalLM": Family(cohere, _COHERE),
    "Cohere2ForCausalLM": Family(cohere2, {**_COHERE, "sliding_window": 4096}),
    "Starcoder2ForCausalLM": Family(
        starcoder2, {**_EPS, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    ),
    "PhiForCausalLM": Family(phi, {**_EPS, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5}),
    "GPTNeoXForCausalLM": Family(
        gpt_neox, {**_EPS, "hidden_act": "gelu", "partial_rotary_factor": 0.25}
    ),
    "FalconForCausalLM": Family(falcon, _FALCON),
    "RWForCausalLM": Family(falcon, _FALCON, _refined_web),
}
