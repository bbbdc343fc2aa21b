"""Families that mix attention with linear attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.contract.errors import BadModelConfig
from engine.models.decoder_spec import MambaSpec, MoeSpec, WeightNames
from engine.models.families.common import (
    ATTENTION_LAYERS,
    STATE_LAYERS,
    Config,
    Family,
    divisor_field,
    head_size,
    layers_with_state,
    refuse,
    size_field,
)
from engine.models.families.llama import llama
from engine.models.families.mla import latent_attention, sigmoid_experts
from engine.models.families.moe import mixtral_experts

#: In checkpoints that `transformers` saved, dense MLPs have the module name of experts.
_KIMI_BY_TRANSFORMERS = WeightNames(
    up=("block_sparse_moe.gate_proj", "block_sparse_moe.up_proj"),
    down="block_sparse_moe.down_proj",
)


def qwen3_next(config: Config) -> dict[str, Any]:
    """Qwen3-Next: gated attention on every `full_attention_interval`-th layer, the gated delta rule
    on the others.
    """
    refuse(config, hidden_act="silu")
    layers, every = int(config["num_hidden_layers"]), int(config["full_attention_interval"])
    if every < 1:
        raise BadModelConfig(
            "config.json: full_attention_interval must be at least 1.",
            param="full_attention_interval",
        )
    types = [
        ATTENTION_LAYERS[1] if (layer + 1) % every == 0 else STATE_LAYERS[1]
        for layer in range(layers)
    ]
    step, dense = int(config["decoder_sparse_step"]), set(config.get("mlp_only_layers") or ())
    if step < 1:
        raise BadModelConfig(
            "config.json: decoder_sparse_step must be at least 1.", param="decoder_sparse_step"
        )
    moe = MoeSpec(
        num_experts=int(config["num_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
        renormalize=bool(config["norm_topk_prob"]),
        shared_size=int(config["shared_expert_intermediate_size"]),
        shared_gate="mlp.shared_expert_gate",
    )
    return {
        **llama(config),
        "qk_norm": "rms_head",
        "norm_offset": 1.0,
        "attention_output_gate": True,
        "moe": moe if moe.num_experts else None,
        "states": _delta(config, layers_with_state(config, types)),
    }


def kimi_linear(config: Config) -> dict[str, Any]:
    """Kimi Linear: most layers are Kimi delta attention, the others multi-head latent attention
    without rotary embedding; experts of DeepSeek V3.
    """
    refuse(config, hidden_act="silu", mla_use_nope=True, moe_router_activation_func="sigmoid")
    refuse(config, moe_layer_freq=1)
    layers, first = int(config["num_hidden_layers"]), int(config["first_k_dense_replace"])
    default = ["dense" if layer < first else "sparse" for layer in range(layers)]
    sparse = tuple(kind == "sparse" for kind in config.get("mlp_layer_types") or default)
    carried = layers_with_state(config, [STATE_LAYERS[1]] * layers, STATE_LAYERS[1:])
    moe = replace(
        sigmoid_experts(config, sparse),
        router="block_sparse_moe.gate",
        choice_bias="block_sparse_moe.gate.e_score_correction_bias",
        experts="block_sparse_moe.experts.",
        expert_names=("w1", "w3", "w2"),
        shared="block_sparse_moe.shared_experts.",
    )
    return {
        **latent_attention(config),
        "names": _KIMI_BY_TRANSFORMERS if "mlp_layer_types" in config else WeightNames(),
        "rope": None,
        "moe": moe if any(sparse) else None,
        "states": _kimi_delta(config, carried) if any(carried) else None,
    }


def _kimi_delta(config: Config, layers: tuple[bool, ...]) -> MambaSpec:
    heads, size = size_field(config, "linear_num_heads"), size_field(config, "linear_head_dim")
    parts = ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj")
    return MambaSpec(
        kind="kda",
        layers=layers,
        num_heads=heads,
        num_key_heads=heads,
        value_size=size,
        key_size=size,
        conv_width=size_field(config, "linear_conv_kernel_dim"),
        separate_inputs=tuple(f"self_attn.{part}" for part in parts),
        dt_proj="self_attn.f_b_proj",
        dt_rank=size,
        output_gate="self_attn.g_b_proj",
        conv=tuple(f"self_attn.{part}_conv1d" for part in "qkv"),
        decay="self_attn.A_log",
        rate_bias="self_attn.dt_bias",
        skip="",
        gated_norm="self_attn.o_norm",
        norm_before_gate=True,
        output="self_attn.o_proj",
    )


def _kimi_names(config: Config) -> Config:
    """Rename Kimi's fields to common ones. Its lists of layers count from 1."""
    names = {
        "model_max_length": "max_position_embeddings",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "moe_renormalize": "norm_topk_prob",
    }
    config = {**config, **{new: config[old] for old, new in names.items() if old in config}}
    linear = config.get("linear_attn_config")
    if not linear:
        return config
    attending = {int(layer) - 1 for layer in linear["full_attn_layers"]}
    return {
        **config,
        "layer_types": [
            ATTENTION_LAYERS[1] if layer in attending else STATE_LAYERS[1]
            for layer in range(int(config["num_hidden_layers"]))
        ],
        "linear_num_heads": linear["num_heads"],
        "linear_head_dim": linear["head_dim"],
        "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
    }


def minimax(config: Config) -> dict[str, Any]:
    """MiniMax-Text-01: lightning attention, full attention on some layers, experts on all."""
    refuse(config, hidden_act="silu", sliding_window=0)
    layers = int(config["num_hidden_layers"])
    types = [ATTENTION_LAYERS[1], STATE_LAYERS[1]] * (layers // 2 + 1)
    carried = layers_with_state(config, types[:layers], STATE_LAYERS[1:])
    return {
        "moe": replace(mixtral_experts(config), scale=float(config["mlp_beta_factor"])),
        "attention_output_scale": float(config["full_attn_beta_factor"]),
        "normed_residual": tuple(
            float(config[f"{part}_alpha_factor"]) for part in ("full_attn", "linear_attn", "mlp")
        ),
        "states": _lightning(config, carried) if any(carried) else None,
    }


def _minimax_names(config: Config) -> Config:
    """Rename the fields of MiniMax's own configs to those of `transformers`.

    Only `postnorm` is supported, where a layer's residual is the norm's output.
    """
    refuse(config, postnorm=True, shared_intermediate_size=0)
    types = config.get("attn_type_list") or ()
    if not {*types} <= {0, 1}:
        raise BadModelConfig(
            "config.json: attn_type_list must name each layer by 0 or 1.", param="attn_type_list"
        )
    factors = {
        f"layernorm_{old}_{letter}": f"{new}_{letter}_factor"
        for old, new in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"))
        for letter in ("alpha", "beta")
    } | {f"layernorm_mlp_{letter}": f"mlp_{letter}_factor" for letter in ("alpha", "beta")}
    renamed = {new: config[old] for old, new in factors.items() if old in config}
    if config.get("rotary_dim"):
        renamed["partial_rotary_factor"] = int(config["rotary_dim"]) / head_size(config)
    if types:
        renamed["layer_types"] = [(STATE_LAYERS[1], ATTENTION_LAYERS[1])[kind] for kind in types]
    return {**config, **renamed}


def _lightning(config: Config, layers: tuple[bool, ...]) -> MambaSpec:
    """Lightning attention: the log decay of head h of H is -2^(-8 (h + 1) / H) per token, times a
    factor that falls from 1 in the first layer to about 0 in the last.
    """
    heads, size = size_field(config, "num_attention_heads"), head_size(config)
    slopes = [2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]
    last = len(layers) - 1 + 1e-5
    factors = [1 - layer / last + 1e-5 for layer in range(len(layers))]
    return MambaSpec(
        kind="lightning",
        layers=layers,
        num_heads=heads,
        num_key_heads=heads,
        value_size=size,
        key_size=size,
        conv_width=1,
        limits=(1.0, 1.0),
        inputs="self_attn.qkv_proj",
        output_gate="self_attn.output_gate",
        output_scale=float(config["linear_attn_beta_factor"]),
        conv=(),
        decay="",
        fixed_decays=tuple(tuple(-slope * factor for slope in slopes) for factor in factors),
        rate_bias="",
        skip="",
        gated_norm="self_attn.norm",
        output="self_attn.out_proj",
    )


def _delta(config: Config, layers: tuple[bool, ...]) -> MambaSpec | None:
    if not any(layers):
        return None
    heads = size_field(config, "linear_num_value_heads")
    return MambaSpec(
        kind="delta",
        layers=layers,
        num_heads=heads,
        num_key_heads=divisor_field(
            config, "linear_num_key_heads", heads, "linear_num_value_heads"
        ),
        value_size=size_field(config, "linear_value_head_dim"),
        key_size=size_field(config, "linear_key_head_dim"),
        conv_width=size_field(config, "linear_conv_kernel_dim"),
        inputs="linear_attn.in_proj_qkvz",
        dt_proj="linear_attn.in_proj_ba",
        conv=("linear_attn.conv1d",),
        decay="linear_attn.A_log",
        rate_bias="linear_attn.dt_bias",
        skip="",
        gated_norm="linear_attn.norm",
        norm_before_gate=True,
        output="linear_attn.out_proj",
    )


_MINIMAX_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "full_attn_alpha_factor": 1.0,
    "full_attn_beta_factor": 1.0,
    "linear_attn_alpha_factor": 1.0,
    "linear_attn_beta_factor": 1.0,
    "mlp_alpha_factor": 1.0,
    "mlp_beta_factor": 1.0,
}

FAMILIES = {
    "MiniMaxText01ForCausalLM": Family(minimax, _MINIMAX_DEFAULTS, _minimax_names),
    "MiniMaxM1ForCausalLM": Family(minimax, _MINIMAX_DEFAULTS, _minimax_names),
    "KimiLinearForCausalLM": Family(
        kimi_linear,
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1048576,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.446,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "linear_num_heads": 32,
            "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
        _kimi_names,
    ),
    "MiniMaxForCausalLM": Family(minimax, _MINIMAX_DEFAULTS),
    "Qwen3NextForCausalLM": Family(
        qwen3_next,
        {
            "head_dim": 256,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.25,
            "full_attention_interval": 4,
            "decoder_sparse_step": 1,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "linear_num_value_heads": 32,
            "linear_num_key_heads": 16,
            "linear_value_head_dim": 128,
            "linear_key_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    ),
}
