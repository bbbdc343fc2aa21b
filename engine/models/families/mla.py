"""Families with multi-head latent attention: DeepSeek V2 and similar models."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engine.contract.errors import BadModelConfig, ModelLoadError
from engine.models.decoder_spec import MlaSpec, MoeSpec, SparseIndexSpec
from engine.models.families.common import Config, Family, refuse
from engine.models.families.llama import llama
from engine.models.rotary_embedding import RopeSpec, rope_spec

_MAX_SIZE = 1 << 16


def deepseek_v2(config: Config) -> dict[str, Any]:
    """DeepSeek V2 and V2 Lite: dense layers, then experts by softmax and shared experts."""
    # With normalized weights, `transformers` and DeepSeek's own code give different results.
    refuse(config, scoring_func="softmax", norm_topk_prob=False)
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelLoadError(
            f"config.json: topk_method {method!r} isn't supported for this architecture.",
            param="topk_method",
        )
    groups = _groups(config, best=1) if method == "group_limited_greedy" else {}
    return {**latent_attention(config), "moe": _experts(config, _expert_layers(config), **groups)}


def deepseek(config: Config) -> dict[str, Any]:
    """DeepSeek MoE: Llama's attention with V2's experts."""
    refuse(config, scoring_func="softmax", norm_topk_prob=False)
    return {**llama(config), "moe": _experts(config, _expert_layers(config))}


def deepseek_v3(config: Config) -> dict[str, Any]:
    """DeepSeek V3 and R1, Kimi K2: experts of the best groups by sigmoid scores plus biases."""
    return {**latent_attention(config), "moe": sigmoid_experts(config, _expert_layers(config))}


def glm4_moe_lite(config: Config) -> dict[str, Any]:
    """GLM-4.7 Flash: V3's experts on the layers that are "sparse" in `mlp_layer_types`."""
    layers = int(config["num_hidden_layers"])
    types = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    if len(types) != layers or not {*types} <= {"dense", "sparse"}:
        raise BadModelConfig(
            f'config.json: mlp_layer_types must name {layers} layers, each "dense" or "sparse".',
            param="mlp_layer_types",
        )
    sparse = tuple(kind == "sparse" for kind in types)
    return {**latent_attention(config), "moe": sigmoid_experts(config, sparse)}


def deepseek_v32(config: Config) -> dict[str, Any]:
    """DeepSeek V3.2: V3 with sparse attention to `index_topk` tokens that an indexer selects."""
    types = ["sparse" if has_experts else "dense" for has_experts in _expert_layers(config)]
    fields = glm4_moe_lite({"mlp_layer_types": types, **config})
    index = SparseIndexSpec(
        num_heads=_size(config, "index_n_heads"),
        head_dim=_size(config, "index_head_dim"),
        top_k=_size(config, "index_topk"),
    )
    latents = replace(fields["latents"], index=index)
    if not latents.query_rank or index.head_dim < latents.qk_rope_head_dim:
        raise BadModelConfig(
            "config.json: index_head_dim must be at least qk_rope_head_dim, with a q_lora_rank.",
            param="index_head_dim",
        )
    return {**fields, "latents": latents, "head_dim": latents.width}


def minicpm3(config: Config) -> dict[str, Any]:
    """MiniCPM 3: rotation of halves (GPT-NeoX); scaled embedding, residual and logits."""
    depth = float(config["scale_depth"]) / math.sqrt(int(config["num_hidden_layers"]))
    size = int(config["hidden_size"]) // int(config["num_attention_heads"])
    return {
        **latent_attention({"v_head_dim": size, **config}),
        "rope_neox": True,
        "embedding_scale": float(config["scale_emb"]),
        "residual_scale": depth,
        "logit_scale": float(config["dim_model_base"]) / int(config["hidden_size"]),
    }


def latent_attention(config: Config) -> dict[str, Any]:
    """Return the `DecoderSpec` fields of multi-head latent attention.

    Raises `BadModelConfig` for invalid sizes, `ModelLoadError` for unsupported biases.
    """
    refuse(config, mlp_bias=False)
    size = _size(config, "qk_rope_head_dim")
    if size % 2:
        raise BadModelConfig(
            f"config.json: qk_rope_head_dim must be even, got {size}.", param="qk_rope_head_dim"
        )
    bias = bool(config.get("attention_bias", False))
    rank = _size(config, "q_lora_rank") if config.get("q_lora_rank") is not None else 0
    if bias and not rank:
        raise ModelLoadError(
            "config.json: attention_bias isn't supported where queries have no latent "
            "(q_lora_rank).",
            param="attention_bias",
        )
    latents = MlaSpec(
        query_rank=rank,
        kv_lora_rank=_size(config, "kv_lora_rank"),
        qk_nope_head_dim=_size(config, "qk_nope_head_dim"),
        qk_rope_head_dim=size,
        value_size=_size(config, "v_head_dim"),
        bias=bias,
    )
    rope = rope_spec(config, size)
    return {
        "latents": latents,
        "num_kv_heads": 1,
        "head_dim": latents.width,
        "o_bias": bias,
        "rope": rope,
        "rope_neox": not config.get("rope_interleave", True),
        "attention_scale": latents.query_size**-0.5 * _stretch(rope) ** 2,
    }


def _stretch(rope: RopeSpec) -> float:
    """Return YaRN's factor of queries and of keys in attention scores (`mscale_all_dim`)."""
    factor, all_dim = rope.params.get("factor"), rope.params.get("mscale_all_dim")
    if rope.kind == "default" or not all_dim or not factor or factor <= 1:
        return 1.0
    return 0.1 * float(all_dim) * math.log(factor) + 1.0


def _expert_layers(config: Config) -> tuple[bool, ...]:
    """Return for each layer whether it has experts: all but the first `first_k_dense_replace`."""
    refuse(config, moe_layer_freq=1)
    first = int(config["first_k_dense_replace"])
    return tuple(layer >= first for layer in range(int(config["num_hidden_layers"])))


def sigmoid_experts(config: Config, layers: tuple[bool, ...]) -> MoeSpec:
    """Return experts that are chosen as in DeepSeek V3."""
    refuse(config, scoring_func="sigmoid", topk_method="noaux_tc")
    bias = "mlp.gate.e_score_correction_bias"
    return _experts(config, layers, sigmoid=True, choice_bias=bias, **_groups(config, best=2))


def _groups(config: Config, best: int) -> dict[str, int]:
    """Return the fields of `MoeSpec` for groups of experts, which are ranked by the sum of their
    `best` highest scores. Raises `BadModelConfig` for groups without enough experts.
    """
    groups, top = int(config.get("n_group") or 1), int(config.get("topk_group") or 1)
    experts, chosen = int(config["n_routed_experts"]), int(config["num_experts_per_tok"])
    if groups == 1:
        return {}
    size = experts // max(groups, 1)
    if not 1 <= top <= groups or size * groups != experts or size < best or top * size < chosen:
        raise BadModelConfig(
            f"config.json: {chosen} of {experts} experts can't be chosen from {top} (topk_group) "
            f"of {groups} groups (n_group).",
            param="n_group",
        )
    return {"groups": groups, "top_groups": top, "group_best": best}


def _experts(config: Config, layers: tuple[bool, ...], **rest: Any) -> MoeSpec:
    """Return routed and shared experts on the layers that are True in `layers`."""
    inner = int(config["moe_intermediate_size"])
    fields = {
        "num_experts": int(config["n_routed_experts"]),
        "top_k": int(config["num_experts_per_tok"]),
        "intermediate_size": inner,
        "layers": layers,
        "renormalize": bool(config.get("norm_topk_prob", False)),
        "scale": float(config["routed_scaling_factor"]),
        "shared_size": inner * int(config["n_shared_experts"]),
        "shared": "mlp.shared_experts.",
    }
    return MoeSpec(**{**fields, **rest})


def _size(config: Config, name: str) -> int:
    """Return a size from 1 to 2^16. Raises `BadModelConfig` for others."""
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_SIZE:
        raise BadModelConfig(
            f"config.json: {name} must be from 1 to {_MAX_SIZE}, got {value!r}.", param=name
        )
    return value


_V2 = {"first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "n_shared_experts": 2}
_V3 = {
    "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_shared_experts": 1,
    "norm_topk_prob": True,
}  # fmt: skip
_LITE = {**_V3, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5}
_MINICPM3 = {
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "scale_emb": 12, "scale_depth": 1.4,
    "dim_model_base": 256,
}  # fmt: skip

FAMILIES = {
    "DeepseekForCausalLM": Family(deepseek, _V2),
    "DeepseekV2ForCausalLM": Family(deepseek_v2, _V2),
    "DeepseekV3ForCausalLM": Family(deepseek_v3, _V3),
    "DeepseekV32ForCausalLM": Family(
        deepseek_v32, {**_V3, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    ),
    "Glm4MoeLiteForCausalLM": Family(glm4_moe_lite, _LITE),
    "MiniCPM3ForCausalLM": Family(minicpm3, _MINICPM3),
    "YoutuForCausalLM": Family(latent_attention, {"tie_word_embeddings": True}),
}
