"""Families some of whose layers carry a state in the place of attention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engine.contract.errors import BadModelConfig, ModelLoadError
from engine.models.decoder_spec import MambaSpec, MoeSpec, WeightNames
from engine.models.families.common import Config, Family, activation_of, head_size, refuse
from engine.models.families.llama import granite, llama

#: Layer types that carry a state, and those that attend.
_CARRYING = ("mamba", "linear_attention")
_ATTENDING = ("attention", "full_attention")
#: Bamba's, Falcon-H1's and Jamba's.
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
#: Of models that are all Mamba, and of Nemotron-H.
_BACKBONE = WeightNames(
    embedding="backbone.embeddings",
    final_norm="backbone.norm_f",
    layer="backbone.layers.{}.",
    attention_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o="mixer.o_proj",
    up=("mixer.up_proj",),
    down="mixer.down_proj",
)
#: Mamba 2's sizes as `transformers` has them for Mamba 2 and Nemotron-H, and for all others.
_MAMBA2_SIZES = {
    "num_heads": "mamba_n_heads",
    "mamba_num_heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "mamba_head_dim": "mamba_d_head",
    "state_size": "mamba_d_state",
    "ssm_state_size": "mamba_d_state",
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
}
#: Characters of Nemotron-H's `hybrid_override_pattern`.
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
#: Granite 4's MLP, which every token goes through, has this name beside experts and without them.
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
    types = [_ATTENDING[1] if (layer + 1) % every == 0 else _CARRYING[1] for layer in range(layers)]
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


def falcon_h1(config: Config) -> dict[str, Any]:
    """Falcon-H1: attention and Mamba 2 beside each other in every layer, with multipliers."""
    refuse(
        config,
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        mamba_proj_bias=False,
        projectors_bias=False,
    )
    layers = (True,) * int(config["num_hidden_layers"])
    input_scale, keys = float(config["attention_in_multiplier"]), float(config["key_multiplier"])
    gate_scale, mlp_scale = map(float, config["mlp_multipliers"])
    states = _mamba2(config, layers)
    scale = float(config["ssm_in_multiplier"])
    scales = tuple(scale * float(factor) for factor in config["ssm_multipliers"])
    if len(scales) != len(states.input_sizes):
        raise BadModelConfig(
            f"config.json: ssm_multipliers must be {len(states.input_sizes)} numbers.",
            param="ssm_multipliers",
        )
    states = replace(
        states,
        input_scales=scales,
        output_scale=float(config["ssm_out_multiplier"]),
        gated_norm=states.gated_norm if config["mamba_rms_norm"] else "",
        norm_before_gate=bool(config["mamba_norm_before_gate"]),
    )
    return {
        "names": _BAMBA,
        # What scales queries, keys and values scales their products.
        "attention_scale": head_size(config) ** -0.5 * input_scale * input_scale * keys,
        "attention_output_scale": input_scale * float(config["attention_out_multiplier"]),
        "mlp_gate_scale": gate_scale,
        "mlp_output_scale": mlp_scale,
        "embedding_scale": float(config["embedding_multiplier"]),
        "logit_scale": float(config["lm_head_multiplier"]),
        "states": states,
        "attends": layers,
    }


def mamba2(config: Config) -> dict[str, Any]:
    """Mamba 2: every layer carries a state, and none has an MLP."""
    refuse(config, hidden_act="silu")
    layers = (True,) * int(config["num_hidden_layers"])
    return {
        "names": _BACKBONE,
        "rope": None,
        "states": replace(_mamba2(config, layers), **_MIXER),
        "attends": (False,) * len(layers),
        "has_mlp": (False,) * len(layers),
    }


#: Names of Mamba 2's weights in `_BACKBONE`.
_MIXER: dict[str, Any] = {
    "inputs": "mixer.in_proj",
    "conv": "mixer.conv1d",
    "decay": "mixer.A_log",
    "rate_bias": "mixer.dt_bias",
    "skip": "mixer.D",
    "gated_norm": "mixer.norm",
    "output": "mixer.out_proj",
}


def nemotron_h(config: Config) -> dict[str, Any]:
    """Nemotron-H: each layer is Mamba 2, attention or an MLP."""
    refuse(
        config,
        mamba_hidden_act="silu",
        attention_bias=False,
        sliding_window=0,
        num_nextn_predict_layers=0,
    )
    types = config["layers_block_type"]
    if unknown := set(types) - {*_CARRYING, *_ATTENDING, "mlp"}:
        raise ModelLoadError(
            f"config.json: layers_block_type: {sorted(unknown)[0]!r} isn't supported.",
            param="layers_block_type",
        )
    carries = tuple(kind in _CARRYING for kind in types)
    limits = (float(config["time_step_min"]), math.inf)
    states = replace(_mamba2(config, carries), limits=limits, **_MIXER)
    return {
        "names": _BACKBONE,
        "rope": None,
        "activation": activation_of({"hidden_act": config["mlp_hidden_act"]}),
        "gated": False,
        "mlp_bias": bool(config["mlp_bias"]),
        "states": states if any(carries) else None,
        "attends": tuple(kind in _ATTENDING for kind in types),
        "has_mlp": tuple(kind == "mlp" for kind in types),
    }


def _nemotron_h_names(config: Config) -> Config:
    """Layers by their types, whichever way they are named."""
    states = _mamba2_sizes({name: value for name, value in config.items() if name != "head_dim"})
    config = {**config, **states}  # `head_dim` is that of attention
    types = config.get("layers_block_type")
    if types is None:
        pattern = config["hybrid_override_pattern"]
        types = [_PATTERN.get(character, character) for character in pattern]
    values = int(config.get("mamba_n_heads", 128)) * int(config.get("mamba_d_head", 64))
    return {
        **config,
        "layers_block_type": types,
        "num_hidden_layers": len(types),
        "mamba_d_ssm": values,
    }


def _mamba2_sizes(config: Config) -> Config:
    """Sizes by the names that all families but Mamba 2 and Nemotron-H have for them."""
    renamed = {new: config[old] for old, new in _MAMBA2_SIZES.items() if old in config}
    return {**config, **renamed}


def mamba(config: Config) -> dict[str, Any]:
    """Mamba: every layer carries a state, and none has an MLP."""
    refuse(config, hidden_act="silu")
    layers = (True,) * int(config["num_hidden_layers"])
    values = int(config["expand"] * int(config["hidden_size"]))
    return {
        "names": _BACKBONE,
        "rope": None,
        "states": _mamba1(
            layers,
            "mixer.",
            values=_size({"intermediate_size": values, **config}, "intermediate_size"),
            keys=_size(config, "state_size"),
            rank=_rank(config, "time_step_rank"),
            conv_width=_size(config, "conv_kernel"),
            conv_bias=bool(config["use_conv_bias"]),
            bias=bool(config["use_bias"]),
        ),
        "attends": (False,) * len(layers),
        "has_mlp": (False,) * len(layers),
    }


def jamba(config: Config) -> dict[str, Any]:
    """Jamba: most layers are Mamba with norms, the others attend; some have experts."""
    refuse(config, hidden_act="silu", sliding_window=0)
    layers, hidden = range(int(config["num_hidden_layers"])), int(config["hidden_size"])
    carries = tuple(not attends for attends in _every_nth(config, "attn_layer", layers))
    experts = _every_nth(config, "expert_layer", layers)
    moe = MoeSpec(
        num_experts=int(config["num_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["intermediate_size"]),
        layers=experts,
        renormalize=False,
        router="feed_forward.router",
        experts="feed_forward.experts.",
    )
    states = _mamba1(
        carries,
        "mamba.",
        values=int(config["mamba_expand"] * hidden),
        keys=_size(config, "mamba_d_state"),
        rank=_rank(config, "mamba_dt_rank"),
        conv_width=_size(config, "mamba_d_conv"),
        conv_bias=bool(config["mamba_conv_bias"]),
        bias=bool(config["mamba_proj_bias"]),
    )
    norms: dict[str, Any] = {
        "dt_norm": "mamba.dt_layernorm",
        "key_norm": "mamba.b_layernorm",
        "query_norm": "mamba.c_layernorm",
    }
    return {
        "names": _BAMBA,
        "rope": None,
        "moe": moe if moe.num_experts > 1 and any(experts) else None,
        "states": replace(states, **norms) if any(carries) else None,
    }


def _every_nth(config: Config, name: str, layers: range) -> tuple[bool, ...]:
    """For each layer whether it is `name`_offset after a multiple of `name`_period."""
    period, offset = _size(config, f"{name}_period"), int(config[f"{name}_offset"])
    return tuple(layer % period == offset for layer in layers)


def _rank(config: Config, name: str) -> int:
    """Size of what Mamba makes rates of."""
    if config[name] == "auto":
        return -(-int(config["hidden_size"]) // 16)
    return _size(config, name)


def _mamba1(
    layers: tuple[bool, ...], prefix: str, *, values: int, keys: int, rank: int, **fields: Any
) -> MambaSpec:
    return MambaSpec(
        kind="mamba1",
        layers=layers,
        num_heads=values,
        num_key_heads=1,
        value_size=1,
        key_size=keys,
        dt_rank=rank,
        inputs=f"{prefix}in_proj",
        dt_proj=f"{prefix}dt_proj",
        x_proj=f"{prefix}x_proj",
        conv=f"{prefix}conv1d",
        decay=f"{prefix}A_log",
        rate_bias=f"{prefix}dt_proj.bias",
        skip=f"{prefix}D",
        gated_norm="",
        output=f"{prefix}out_proj",
        **fields,
    )


def lfm2_moe(config: Config) -> dict[str, Any]:
    """LFM2 with experts in all layers but the first ones."""
    refuse(config, use_expert_bias=True)
    layers, dense = int(config["num_hidden_layers"]), int(config["num_dense_layers"])
    moe = MoeSpec(
        num_experts=int(config["num_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        layers=tuple(layer >= dense for layer in range(layers)),
        renormalize=bool(config["norm_topk_prob"]),
        sigmoid=True,
        choice_bias="feed_forward.expert_bias",
        scale=float(config["routed_scaling_factor"]),
        router="feed_forward.gate",
        experts="feed_forward.experts.",
        expert_names=("w1", "w3", "w2"),
    )
    return {**lfm2(config), "moe": moe}


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
    values = int(config.get("mamba_d_ssm") or config["mamba_expand"] * int(config["hidden_size"]))
    size = config.get("mamba_d_head", "auto")
    size = values // heads if size == "auto" else _size(config, "mamba_d_head")
    if heads * size != values:
        raise BadModelConfig(
            f"config.json: mamba_n_heads ({heads}) heads of mamba_d_head ({size}) must have "
            f"mamba_d_ssm, or mamba_expand x hidden_size ({values}) values.",
            param="mamba_n_heads",
        )
    min_step, max_step = config.get("time_step_limit") or (0.0, math.inf)
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
        limits=(_number(min_step), _number(max_step)),
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
        norm_before_gate=True,
        output="linear_attn.out_proj",
    )


def _size(config: Config, name: str) -> int:
    """A size that can be. Raises `BadModelConfig` for others."""
    value = int(config[name])
    if not 1 <= value < 1 << 20:
        raise BadModelConfig(f"config.json: {name} must be from 1 to 2^20 - 1.", param=name)
    return value


def _divisor(config: Config, name: str, total: int, of: str) -> int:
    """A size that divides another one. Raises `BadModelConfig` for others."""
    value = _size(config, name)
    if total % value:
        raise BadModelConfig(
            f"config.json: {name} ({value}) must divide {of} ({total}).", param=name
        )
    return value


def _number(value: Any) -> float:
    """A number of config.json; infinity may be an object there, as `transformers` writes it."""
    return float(value["__float__"] if isinstance(value, dict) else value)


_LFM2_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "conv_bias": False,
}
#: A state has no longest context; where config.json names none, it is as in vLLM.
_ALL_MAMBA = {
    "num_attention_heads": 1,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
FAMILIES = {
    "FalconH1ForCausalLM": Family(
        falcon_h1,
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": True,
            "attention_in_multiplier": 1.0,
            "attention_out_multiplier": 1.0,
            "key_multiplier": 1.0,
            "mlp_multipliers": [1.0, 1.0],
            "embedding_multiplier": 1.0,
            "lm_head_multiplier": 1.0,
            "ssm_in_multiplier": 1.0,
            "ssm_out_multiplier": 1.0,
            "ssm_multipliers": [1.0] * 5,
        },
    ),
    "JambaForCausalLM": Family(
        jamba,
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": "auto",
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
    ),
    "Lfm2MoeForCausalLM": Family(
        lfm2_moe,
        {
            **_LFM2_DEFAULTS,
            "block_auto_adjust_ff_dim": False,
            "use_expert_bias": True,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        _lfm2_names,
    ),
    "MambaForCausalLM": Family(
        mamba,
        {
            **_ALL_MAMBA,
            "tie_word_embeddings": True,
            "state_size": 16,
            "expand": 2,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "use_bias": False,
            "time_step_rank": "auto",
        },
    ),
    "Mamba2ForCausalLM": Family(
        mamba2,
        {
            **_ALL_MAMBA,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
        _mamba2_sizes,
    ),
    "NemotronHForCausalLM": Family(
        nemotron_h,
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "head_dim": 128,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 8,
            "mamba_d_conv": 4,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "mlp_bias": False,
            "mlp_hidden_act": "relu2",
            "time_step_min": 0.001,
        },
        _nemotron_h_names,
    ),
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
            **_LFM2_DEFAULTS,
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
