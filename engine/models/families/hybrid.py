"""Families some of whose layers carry a state in the place of attention."""

from __future__ import annotations

import math
from typing import Any

from engine.contract.errors import BadModelConfig, ModelLoadError
from engine.models.decoder_spec import MambaSpec, MoeSpec, WeightNames
from engine.models.families.common import Config, Family, refuse
from engine.models.families.llama import granite, llama

#: Layer types that carry a state, and those that attend.
_CARRYING = ("mamba", "linear_attention")
_ATTENDING = ("attention", "full_attention")
#: Granite 4's MLP, which every token goes through, has this name beside experts and without them.
_BAMBA = WeightNames(
    final_norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
_LFM2 = WeightNames(
    final_norm="model.embedding_norm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    o="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)
_GRANITE4 = WeightNames(up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")


def granite4(config: Config) -> dict[str, Any]:
    """Granite 4: Granite, most of whose layers are Mamba 2, with experts beside the MLP or not."""
    refuse(config, hidden_act="silu")
    layers, shared = int(config["num_hidden_layers"]), int(config["shared_intermediate_size"])
    carried = _carried(config, ["mamba"] * layers)
    experts = int(config["num_experts"])
    moe = MoeSpec(
        num_experts=experts,
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["intermediate_size"]),
        layers=(True,) * layers,
        softmax_first=False,
        router="block_sparse_moe.router.layer",
        layout="granite",
        experts="block_sparse_moe.",
        shared_size=shared,
        shared="shared_mlp.",
        shared_up=("input_linear",),
        shared_down="output_linear",
    )
    return {
        **granite(config),
        **({} if config.get("position_embedding_type") == "rope" else {"rope": None}),
        "names": _GRANITE4,
        "intermediate_size": shared,
        "moe": moe if experts else None,
        "states": _mamba2(config, carried) if any(carried) else None,
    }


def qwen3_next(config: Config) -> dict[str, Any]:
    """Qwen3-Next: three of four layers by the gated delta rule, the others' attention has gates."""
    refuse(config, hidden_act="silu")
    layers, every = int(config["num_hidden_layers"]), int(config["full_attention_interval"])
    if every < 1:
        raise BadModelConfig(
            "config.json: full_attention_interval must be at least 1.",
            param="full_attention_interval",
        )
    types = [_ATTENDING[1] if (at + 1) % every == 0 else _CARRYING[1] for at in range(layers)]
    step, plain = int(config["decoder_sparse_step"]), set(config.get("mlp_only_layers") or ())
    if step < 1:
        raise BadModelConfig(
            "config.json: decoder_sparse_step must be at least 1.", param="decoder_sparse_step"
        )
    moe = MoeSpec(
        num_experts=int(config["num_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        layers=tuple(at not in plain and (at + 1) % step == 0 for at in range(layers)),
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
        "states": _delta(config, _carried(config, types)),
    }


def bamba(config: Config) -> dict[str, Any]:
    """Bamba: most layers are Mamba 2, the others attend; each has an MLP."""
    refuse(config, hidden_act="silu")
    attending = set(config.get("attn_layer_indices") or ())
    types = [
        _ATTENDING[0] if index in attending else _CARRYING[0]
        for index in range(int(config["num_hidden_layers"]))
    ]
    carried, bias = _carried(config, types), bool(config["attention_bias"])
    return {
        "names": _BAMBA,
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(config["mlp_bias"]),
        "states": _mamba2(config, carried) if any(carried) else None,
    }


def lfm2(config: Config) -> dict[str, Any]:
    """LFM2: most layers are short convolutions between two gates, the others attend."""
    layers, attending = int(config["num_hidden_layers"]), config.get("full_attn_idxs")
    types = [
        _ATTENDING[1] if attending is None or index in attending else "conv"
        for index in range(layers)
    ]
    carried, hidden = _carried(config, types, ("conv",)), int(config["hidden_size"])
    bias = bool(config["conv_bias"])
    states = MambaSpec(
        kind="conv",
        layers=carried,
        num_heads=1,
        num_key_heads=1,
        value_size=hidden,
        key_size=0,
        conv_width=_size(config, "conv_L_cache"),
        conv_bias=bias,
        bias=bias,
        inputs="conv.in_proj",
        conv="conv.conv",
        decay="",
        rate_bias="",
        skip="",
        gated_norm="",
        output="conv.out_proj",
    )
    return {
        "names": _LFM2,
        "qk_norm": "rms_head",
        "activation": "silu",
        "intermediate_size": _lfm2_mlp_size(config),
        "states": states if any(carried) else None,
    }


def _lfm2_mlp_size(config: Config) -> int:
    """Two thirds of the size that is named, times a factor, rounded up."""
    size = int(config.get("block_ff_dim") or config["intermediate_size"])
    if not config["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    if (factor := config.get("block_ffn_dim_multiplier")) is not None:
        multiple = _size(config, "block_multiple_of")
        size = -(-int(factor * size) // multiple) * multiple
    return size


def _lfm2_names(config: Config) -> Config:
    """Names that only the first checkpoints have."""
    older = {"theta": "rope_theta", "tie_embedding": "tie_word_embeddings"}
    return {**config, **{new: config[old] for old, new in older.items() if old in config}}


def _carried(
    config: Config, default: list[str], carrying: tuple[str, ...] = _CARRYING
) -> tuple[bool, ...]:
    """For each layer, whether it carries a state: it does if its type is one of `carrying`."""
    types = config.get("layer_types") or config.get("layers_block_type") or default
    if len(types) != len(default):
        raise ModelLoadError(
            f"config.json: layer_types names {len(types)} layers of {len(default)}.",
            param="layer_types",
        )
    for kind in types:
        if kind not in (*carrying, *_ATTENDING):
            raise ModelLoadError(
                f"config.json: layer_types: {kind!r} isn't supported.", param="layer_types"
            )
    return tuple(kind in carrying for kind in types)


def _mamba2(config: Config, layers: tuple[bool, ...]) -> MambaSpec:
    heads = _size(config, "mamba_n_heads")
    values = int(config["mamba_expand"] * int(config["hidden_size"]))
    size = config.get("mamba_d_head", "auto")
    size = values // heads if size == "auto" else _size(config, "mamba_d_head")
    if heads * size != values:
        raise BadModelConfig(
            f"config.json: mamba_n_heads ({heads}) heads of mamba_d_head ({size}) must have "
            f"mamba_expand x hidden_size ({values}) values.",
            param="mamba_n_heads",
        )
    least, most = config.get("time_step_limit") or (0.0, math.inf)
    groups = _divisor(config, "mamba_n_groups", heads, "mamba_n_heads")
    return MambaSpec(
        kind="mamba2",
        layers=layers,
        num_heads=heads,
        num_key_heads=groups,
        value_size=size,
        key_size=_size(config, "mamba_d_state"),
        conv_width=_size(config, "mamba_d_conv"),
        conv_bias=bool(config["mamba_conv_bias"]),
        bias=bool(config["mamba_proj_bias"]),
        limits=(_number(least), _number(most)),
    )


def _delta(config: Config, layers: tuple[bool, ...]) -> MambaSpec | None:
    if not any(layers):
        return None
    heads = _size(config, "linear_num_value_heads")
    return MambaSpec(
        kind="delta",
        layers=layers,
        num_heads=heads,
        num_key_heads=_divisor(config, "linear_num_key_heads", heads, "linear_num_value_heads"),
        value_size=_size(config, "linear_value_head_dim"),
        key_size=_size(config, "linear_key_head_dim"),
        conv_width=_size(config, "linear_conv_kernel_dim"),
        inputs="linear_attn.in_proj_qkvz",
        dt_proj="linear_attn.in_proj_ba",
        conv="linear_attn.conv1d",
        decay="linear_attn.A_log",
        rate_bias="linear_attn.dt_bias",
        skip="",
        gated_norm="linear_attn.norm",
        output="linear_attn.out_proj",
    )


def _size(config: Config, name: str) -> int:
    """A size that can be. Raises `BadModelConfig` for others."""
    value = int(config[name])
    if not 1 <= value < 1 << 20:
        raise BadModelConfig(f"config.json: {name} must be from 1 to 2^20 - 1.", param=name)
    return value


def _divisor(config: Config, name: str, whole: int, of: str) -> int:
    """A size that divides another one. Raises `BadModelConfig` for others."""
    value = _size(config, name)
    if whole % value:
        raise BadModelConfig(
            f"config.json: {name} ({value}) must divide {of} ({whole}).", param=name
        )
    return value


def _number(value: Any) -> float:
    """A number of config.json; infinity may be an object there, as `transformers` writes it."""
    return float(value["__float__"] if isinstance(value, dict) else value)


FAMILIES = {
    "BambaForCausalLM": Family(
        bamba,
        {
            "attention_bias": False,
            "mlp_bias": False,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
    ),
    "Lfm2ForCausalLM": Family(
        lfm2,
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 128000,
            "tie_word_embeddings": True,
            "conv_L_cache": 3,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
        },
        _lfm2_names,
    ),
    "GraniteMoeHybridForCausalLM": Family(
        granite4,
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
    ),
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
