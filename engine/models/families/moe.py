"""Mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.decoder_spec import MoeSpec, WeightNames
from engine.models.families.common import (
    ACTIVATIONS,
    Config,
    Family,
    every_nth_full,
    refuse,
    window_everywhere,
    windows_by_type,
)
from engine.models.families.llama import granite, llama, qwen2, qwen3
from engine.models.rotary_embedding import rope_spec


def mixtral(config: Config) -> dict[str, Any]:
    """Mixtral: experts on every layer; the weights of the chosen ones sum to 1."""
    return {"moe": mixtral_experts(config), "sliding_windows": window_everywhere(config)}


def mixtral_experts(config: Config) -> MoeSpec:
    """Return experts on every layer with Mixtral's weight names."""
    return _experts_everywhere(
        config,
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts.",
        expert_names=("w1", "w3", "w2"),
    )


def qwen2_moe(config: Config) -> dict[str, Any]:
    """Qwen 2 MoE: routed experts and a gated shared expert."""
    moe = _qwen_experts(
        config,
        shared_size=int(config["shared_expert_intermediate_size"]),
        shared_gate="mlp.shared_expert_gate",
    )
    return {**qwen2(config), "moe": moe}


def qwen3_moe(config: Config) -> dict[str, Any]:
    """Qwen 3 MoE."""
    return {
        **qwen3(config),
        "sliding_windows": window_everywhere(
            config
            if config.get("use_sliding_window")
            else {**config, "sliding_window": 0, "layer_types": None}
        ),
        "moe": _qwen_experts(config),
    }


def qwen3_vl_moe(config: Config) -> dict[str, Any]:
    """The text model of Qwen3-VL MoE: experts in fused tensors, weights that sum to 1."""
    moe = replace(_qwen_experts(config), layout="transposed", renormalize=True)
    return {**qwen3_moe(config), "moe": moe}


def olmoe(config: Config) -> dict[str, Any]:
    """OLMoE: queries and keys normed over all heads together; optionally clipped projections."""
    moe = _experts_everywhere(
        config,
        renormalize=bool(config.get("norm_topk_prob", False)),
    )
    return {
        **llama(config),
        "moe": moe,
        "qk_norm": "rms_full",
        "clip_qkv": float(config.get("clip_qkv") or 0.0),
    }


def granite_moe(config: Config) -> dict[str, Any]:
    """Granite MoE: experts in two fused tensors, softmax over the chosen experts' scores."""
    moe = _experts_everywhere(
        config,
        softmax_first=False,
        router="block_sparse_moe.router.layer",
        layout="granite",
        experts="block_sparse_moe.",
    )
    return {**granite(config), "moe": moe}


def dbrx(config: Config) -> dict[str, Any]:
    """DBRX: LayerNorm without bias, clipped projections, experts' weights stacked by rows."""
    attention, ffn = config["attn_config"], config["ffn_config"]
    refuse(ffn, moe_normalize_expert_weights=1)
    act = (ffn.get("ffn_act_fn") or {}).get("name", "silu")
    refuse({"ffn_act_fn": act}, ffn_act_fn=act if act in ACTIVATIONS else "silu")
    inner = int(ffn["ffn_hidden_size"])
    size = int(config["hidden_size"]) // int(config["num_attention_heads"])
    moe = MoeSpec(
        num_experts=int(ffn["moe_num_experts"]),
        top_k=int(ffn["moe_top_k"]),
        intermediate_size=inner,
        layers=_all_layers(config),
        renormalize=ffn.get("moe_normalize_expert_weights", 1.0) is not None,
        router="ffn.router.layer",
        layout="flat",
        experts="ffn.experts.mlp.",
        expert_names=("w1", "v1", "w2"),
    )
    theta = config.get("rope_theta") or attention.get("rope_theta") or 10000.0
    return {
        "moe": moe,
        "rope": rope_spec({**config, "rope_theta": theta}, size),
        "intermediate_size": inner,
        "activation": ACTIVATIONS[act],
        "num_kv_heads": int(attention["kv_n_heads"]),
        "clip_qkv": float(attention.get("clip_qkv") or 0.0),
        "norm": "layer",
        "names": WeightNames(
            embedding="transformer.wte",
            final_norm="transformer.norm_f",
            layer="transformer.blocks.{}.",
            attention_norm="norm_attn_norm.norm_1",
            mlp_norm="norm_attn_norm.norm_2",
            qkv=("norm_attn_norm.attn.Wqkv",),
            o="norm_attn_norm.attn.out_proj",
        ),
    }


def gpt_oss(config: Config) -> dict[str, Any]:
    """gpt-oss: attention sinks, a sliding window on every other layer, a clamped activation,
    biases.
    """
    moe = _experts_everywhere(
        config,
        softmax_first=False,
        router="mlp.router",
        router_bias=True,
        layout="interleaved",
    )
    return {
        **llama(config),
        "moe": moe,
        "sinks": True,
        "activation": "swiglu_clamped",
        "activation_limit": float(config.get("swiglu_limit", 7.0)),
        "activation_alpha": float(config.get("swiglu_alpha", 1.702)),
        "sliding_windows": windows_by_type(config, every_nth_full(config, 2)),
    }


def glm4_moe(config: Config) -> dict[str, Any]:
    """GLM-4.5 and 4.6: dense layers, then experts by sigmoid scores and shared experts."""
    refuse(config, n_group=1)
    layers, first = int(config["num_hidden_layers"]), int(config["first_k_dense_replace"])
    inner = int(config["moe_intermediate_size"])
    moe = MoeSpec(
        num_experts=int(config.get("n_routed_experts") or config["num_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=inner,
        layers=tuple(layer >= first for layer in range(layers)),
        renormalize=bool(config["norm_topk_prob"]),
        sigmoid=True,
        choice_bias="mlp.gate.e_score_correction_bias",
        scale=float(config["routed_scaling_factor"]),
        shared_size=inner * int(config["n_shared_experts"]),
        shared="mlp.shared_experts.",
    )
    return {
        "moe": moe,
        "qkv_bias": bool(config.get("attention_bias", False)),
        "qk_norm": "rms_head" if config.get("use_qk_norm") else "",
    }


def _experts_everywhere(config: Config, **rest: Any) -> MoeSpec:
    """Return experts on every layer, with the config's `intermediate_size`."""
    return MoeSpec(
        num_experts=int(config["num_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["intermediate_size"]),
        layers=_all_layers(config),
        **rest,
    )


def _all_layers(config: Config) -> tuple[bool, ...]:
    return (True,) * int(config["num_hidden_layers"])


def _qwen_experts(config: Config, **shared: Any) -> MoeSpec:
    """Return experts on each `decoder_sparse_step`-th layer that isn't in `mlp_only_layers`."""
    step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or ()
    return MoeSpec(
        num_experts=int(config["num_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        layers=tuple(
            layer not in dense and (layer + 1) % step == 0
            for layer in range(int(config["num_hidden_layers"]))
        ),
        renormalize=bool(config.get("norm_topk_prob", False)),
        **shared,
    )


_OSS = {"rms_norm_eps": 1e-5, "sliding_window": 128, "attention_bias": True, "head_dim": 64}

_GLM4 = {
    "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "moe_intermediate_size": 1408,
}  # fmt: skip

FAMILIES = {
    "MixtralForCausalLM": Family(mixtral, {"rms_norm_eps": 1e-5, "rope_theta": 1e6}),
    "Qwen2MoeForCausalLM": Family(qwen2_moe),
    "Qwen3MoeForCausalLM": Family(qwen3_moe),
    "Qwen3VLMoeTextModel": Family(qwen3_vl_moe),
    "OlmoeForCausalLM": Family(olmoe, {"rms_norm_eps": 1e-5, "eos_token_id": 50279}),
    "GraniteMoeForCausalLM": Family(granite_moe),
    "DbrxForCausalLM": Family(dbrx, {"rms_norm_eps": 1e-5}),
    "GptOssForCausalLM": Family(gpt_oss, _OSS),
    "Glm4MoeForCausalLM": Family(glm4_moe, _GLM4),
}
