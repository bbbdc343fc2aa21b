"""Llama and similar families, most with RMSNorm, rotary embedding and a gated MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.contract.errors import BadModelConfig
from engine.models.decoder_spec import AltUpSpec, WeightNames
from engine.models.families.common import (
    Config,
    Family,
    activation_of,
    every_nth_full,
    head_size,
    refuse,
    rotary_dim,
    shared_fields,
    size_field,
    window_everywhere,
    windows_by_type,
)
from engine.models.rotary_embedding import RopeSpec, rope_spec

SANDWICH = WeightNames(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)


def gemma(config: Config) -> dict[str, Any]:
    """Gemma: checkpoints store norm weights minus 1; embeddings are scaled by the root of
    their size.
    """
    refuse(config, use_bidirectional_attention=False)
    bias = bool(config.get("attention_bias", False))
    activation = activation_of(config) if config.get("hidden_act") else "gelu_tanh"
    return {
        "norm_offset": 1.0,
        "embedding_scale": float(config["hidden_size"]) ** 0.5,
        # Early checkpoints have "gelu", which stands for its tanh approximation.
        "activation": "gelu_tanh" if activation == "gelu" else activation,
        "qkv_bias": bias,
        "o_bias": bias,
    }


def gemma2(config: Config) -> dict[str, Any]:
    """Gemma 2: norms before and after attention and MLP, soft caps, a sliding window on every other
    layer.
    """
    return {
        **gemma(config),
        "names": SANDWICH,
        "attention_scale": float(config["query_pre_attn_scalar"]) ** -0.5,
        "attention_soft_cap": float(config.get("attn_logit_softcapping") or 0.0),
        "logit_soft_cap": float(config.get("final_logit_softcapping") or 0.0),
        "sliding_windows": windows_by_type(config, every_nth_full(config, 2)),
    }


def gemma3(config: Config) -> dict[str, Any]:
    """Gemma 3: queries and keys normed by head, another RoPE base with a sliding window."""
    pattern = int(config.get("sliding_window_pattern", 6))
    windows = windows_by_type(config, every_nth_full(config, pattern))
    head_dim = int(config["head_dim"])
    dim = rotary_dim(config, head_dim)
    full_rope = rope_spec(config, dim, "full_attention")
    local = _local_rope(config, dim)
    return {
        **gemma2({**config, "layer_types": None}),
        "qk_norm": "rms_head",
        "sliding_windows": windows,
        "rope": full_rope,
        "layer_ropes": tuple(local if window else full_rope for window in windows),
    }


def gemma3n(config: Config) -> dict[str, Any]:
    """Gemma 3n's text model: several hidden states per token (AltUp), an embedding for each layer,
    and last layers that use the keys and values of earlier ones.
    """
    refuse(config, altup_active_idx=0, hidden_act="gelu_pytorch_tanh")
    layers = int(config["num_hidden_layers"])
    windows = windows_by_type(config, every_nth_full(config, 5))
    sparsity = config.get("activation_sparsity_pattern")
    if sparsity is None:
        num_sparse = 10 if layers > 10 else 0
        sparsity = [0.95] * num_sparse + [0.0] * (layers - num_sparse)
    if len(sparsity) != layers or not all(0 <= share < 1 for share in sparsity):
        raise BadModelConfig(
            f"config.json: activation_sparsity_pattern must be {layers} numbers in [0, 1).",
            param="activation_sparsity_pattern",
        )
    return {
        **gemma3({**config, "sliding_window_pattern": 5, "query_pre_attn_scalar": 1}),
        "norm_offset": 0.0,
        "value_norm": True,
        "kv_sources": _kv_sources(windows, int(config["num_kv_shared_layers"])),
        "altup": AltUpSpec(
            num_states=size_field(config, "altup_num_inputs"),
            scales_output=bool(config["altup_correct_scale"]),
            laurel_rank=size_field(config, "laurel_rank"),
            per_layer_size=size_field(config, "hidden_size_per_layer_input"),
            per_layer_vocab_size=size_field(config, "vocab_size_per_layer_input"),
            sparsity=tuple(float(share) for share in sparsity),
        ),
    }


def _kv_sources(windows: tuple[int, ...], num_shared: int) -> tuple[int, ...]:
    """Return for each layer the index of the layer whose keys and values it uses.

    That is its own; the last `num_shared` layers use those of the last layer before them all that
    has the same window.

    Raises `BadModelConfig` unless there is such a layer for each window.
    """
    first = len(windows) - num_shared
    last_layers = {window: layer for layer, window in enumerate(windows[: max(0, first)])}
    if num_shared < 0 or not set(windows) <= last_layers.keys():
        raise BadModelConfig(
            "config.json: num_kv_shared_layers must leave a layer of each type that keeps keys and "
            f"values; got {num_shared} of {len(windows)}.",
            param="num_kv_shared_layers",
        )
    return tuple(
        layer if layer < first else last_layers[window] for layer, window in enumerate(windows)
    )


def _gemma3n_names(config: Config) -> Config:
    """Replace fields by those of `text_config`, if there is one, and a list of equal MLP sizes by
    the size. Raises `BadModelConfig` for different sizes.
    """
    config = {**config, **(config.get("text_config") or {}), **shared_fields(config)}
    sizes = config.get("intermediate_size")
    if not isinstance(sizes, list):
        return config
    if len(set(sizes)) != 1:
        raise BadModelConfig(
            "config.json: intermediate_size must be the same for all layers.",
            param="intermediate_size",
        )
    return {**config, "intermediate_size": sizes[0]}


def _local_rope(config: Config, dim: int) -> RopeSpec:
    """Return the rotary embedding of layers with a sliding window. Older configs have only its
    base.
    """
    rope = (config.get("rope_parameters") or {}).get("sliding_attention")
    if rope:
        return rope_spec({**config, "rope_scaling": None}, dim, "sliding_attention")
    theta = float(config.get("rope_local_base_freq", 10000.0))
    return RopeSpec(theta, dim, max_position_embeddings=int(config["max_position_embeddings"]))


_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256}
_GEMMA2 = {"sliding_window": 4096, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}

GEMMA_FAMILIES = {
    "GemmaForCausalLM": Family(gemma, _GEMMA | {"max_position_embeddings": 8192}),
    "Gemma2ForCausalLM": Family(gemma2, _GEMMA | _GEMMA2 | {"max_position_embeddings": 8192}),
    "Gemma3nForCausalLM": Family(
        gemma3n,
        {
            "head_dim": 256,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "sliding_window": 512,
            "rope_theta": 1e6,
            "max_position_embeddings": 32768,
            "final_logit_softcapping": 30.0,
            "altup_num_inputs": 4,
            "altup_correct_scale": True,
            "num_kv_shared_layers": 15,
            "laurel_rank": 64,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
        },
        _gemma3n_names,
    ),
    "Gemma3ForCausalLM": Family(
        gemma3,
        _GEMMA | {"sliding_window": 4096, "rope_theta": 1e6, "max_position_embeddings": 131072},
    ),
}


GLM = WeightNames(up=("mlp.gate_up_proj",))
GLM4 = replace(
    GLM, attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm"
)


def glm(config: Config) -> dict[str, Any]:
    """GLM: interleaved rotation, by default of half of each head; biases of queries, keys and
    values.
    """
    return {
        "names": GLM,
        "qkv_bias": bool(config.get("attention_bias", True)),
        "rope_neox": False,
    }


def glm4(config: Config) -> dict[str, Any]:
    """GLM-4-0414: norms before and after attention and MLP."""
    return {**glm(config), "names": GLM4}


_GLM_DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
    "eos_token_id": [151329, 151336, 151338],
}

GLM_FAMILIES = {
    "GlmForCausalLM": Family(glm, _GLM_DEFAULTS),
    "Glm4ForCausalLM": Family(glm4, _GLM_DEFAULTS),
}


FUSED = WeightNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))


def llama(config: Config) -> dict[str, Any]:
    """Llama, with biases if the config enables them."""
    bias = bool(config.get("attention_bias", False))
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "sliding_windows": (0,) * int(config["num_hidden_layers"]),
    }


def mistral(config: Config) -> dict[str, Any]:
    """Mistral: a sliding window on every layer if the config has one."""
    return {"sliding_windows": window_everywhere(config)}


def qwen2(config: Config) -> dict[str, Any]:
    """Qwen 2: biases of queries, keys and values."""
    return {"qkv_bias": bool(config.get("qkv_bias", True)), "sliding_windows": qwen_windows(config)}


def qwen3(config: Config) -> dict[str, Any]:
    """Qwen 3: queries and keys normed by head."""
    return {**llama(config), "qk_norm": "rms_head", "sliding_windows": qwen_windows(config)}


def qwen_windows(config: Config) -> tuple[int, ...]:
    """Return Qwen's sliding windows: none without `use_sliding_window`; otherwise by `layer_types`,
    or on the layers from `max_window_layers` on.
    """
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
    return {"names": FUSED, "sliding_windows": window_everywhere(config)}


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
    """SmolLM3: by default every fourth layer has no rotary embedding. If windows are used without
    `layer_types`, these layers have them.
    """
    layers = int(config["num_hidden_layers"])
    rotated = _rotated_layers(config, layers)
    types = ["full_attention" if is_rotated else "sliding_attention" for is_rotated in rotated]
    rope = rope_spec(config, rotary_dim(config, head_size(config)))
    return {
        **llama(config),
        "layer_ropes": tuple(rope if is_rotated else None for is_rotated in rotated),
        "sliding_windows": windows_by_type(config, types)
        if config.get("use_sliding_window")
        else (0,) * layers,
    }


def _rotated_layers(config: Config, layers: int) -> list[bool]:
    """Return for each layer whether it has rotary embedding. Raises `BadModelConfig` for an invalid
    `no_rope_layers` or `no_rope_layer_interval`.
    """
    flags = config.get("no_rope_layers")
    if flags is None:
        every = int(config.get("no_rope_layer_interval", 4))
        if every < 1:
            raise BadModelConfig(
                "config.json: no_rope_layer_interval must be at least 1.",
                param="no_rope_layer_interval",
            )
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if not isinstance(flags, list) or len(flags) < layers or not all(v in (0, 1) for v in flags):
        raise BadModelConfig(
            "config.json: no_rope_layers must be a list of 1 (rotated) or 0 for each of "
            f"{layers} layers.",
            param="no_rope_layers",
        )
    return [bool(turned) for turned in flags[:layers]]


LLAMA_FAMILIES = {
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


#: Norms on the outputs of attention and MLP, none on their inputs.
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
    """OLMo 2: norms after attention and MLP; queries and keys normed over all heads together."""
    return {**llama(config), "names": POST_NORM, "qk_norm": "rms_full"}


def olmo3(config: Config) -> dict[str, Any]:
    """OLMo 3: by default every fourth layer has full attention, the others have a sliding window;
    only the rotary embedding of full attention is scaled.
    """
    windows = windows_by_type(config, every_nth_full(config, 4))
    dim = rotary_dim(config, head_size(config))
    full_rope = rope_spec(config, dim, "full_attention")
    local = _windowed_rope(config, dim, full_rope)
    return {
        **olmo2(config),
        "sliding_windows": windows,
        "rope": full_rope,
        "layer_ropes": tuple(local if window else full_rope for window in windows),
    }


def _windowed_rope(config: Config, dim: int, full_rope: RopeSpec) -> RopeSpec:
    """Return the rotary embedding of layers with a sliding window. Older configs have one base for
    all layers.
    """
    if isinstance((config.get("rope_parameters") or {}).get("sliding_attention"), dict):
        return rope_spec({**config, "rope_scaling": None}, dim, "sliding_attention")
    return RopeSpec(full_rope.theta, dim, max_position_embeddings=full_rope.max_position_embeddings)


OLMO_FAMILIES = {
    "OlmoForCausalLM": Family(olmo, {"eos_token_id": 50279}),
    "Olmo2ForCausalLM": Family(olmo2, {"rms_norm_eps": 1e-5, "eos_token_id": 50279}),
    "Olmo3ForCausalLM": Family(
        olmo3,
        {"rms_norm_eps": 1e-5, "eos_token_id": 50279, "rope_theta": 5e5, "sliding_window": 4096},
    ),
}
