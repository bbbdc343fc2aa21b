"""Families of Mamba 2, with and without attention layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engine.contract.errors import BadModelConfig, ModelLoadError
from engine.models.decoder_spec import MambaSpec, MoeSpec, SharedBlockSpec, WeightNames
from engine.models.families.common import (
    ATTENTION_LAYERS,
    STATE_LAYERS,
    Config,
    Family,
    activation_of,
    divisor_field,
    head_size,
    layers_with_state,
    refuse,
    size_field,
)
from engine.models.families.llama import granite

#: Weight names of Bamba, Falcon-H1 and Jamba.
BAMBA_NAMES = WeightNames(
    final_norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)

_ZAMBA2 = WeightNames(final_norm="model.final_layernorm")

#: Weight names of Mamba, Mamba 2 and Nemotron-H.
BACKBONE_NAMES = WeightNames(
    embedding="backbone.embeddings",
    final_norm="backbone.norm_f",
    layer="backbone.layers.{}.",
    attention_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o="mixer.o_proj",
    up=("mixer.up_proj",),
    down="mixer.down_proj",
)

#: Mamba 2's sizes: names in configs of Mamba 2 and Nemotron-H -> names in all other families.
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

#: Characters of Nemotron-H's `hybrid_override_pattern` -> layer types.
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}

#: Granite 4's dense MLP has this name with and without experts.
_GRANITE4 = WeightNames(up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")


def granite4(config: Config) -> dict[str, Any]:
    """Granite 4: Granite with mostly Mamba 2 layers, and optionally experts beside the MLP."""
    refuse(config, hidden_act="silu")
    layers, shared = int(config["num_hidden_layers"]), int(config["shared_intermediate_size"])
    carried = layers_with_state(config, ["mamba"] * layers)
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


def bamba(config: Config) -> dict[str, Any]:
    """Bamba: most layers are Mamba 2, the others have attention; each has an MLP."""
    refuse(config, hidden_act="silu")
    attending = set(config.get("attn_layer_indices") or ())
    types = [
        ATTENTION_LAYERS[0] if index in attending else STATE_LAYERS[0]
        for index in range(int(config["num_hidden_layers"]))
    ]
    carried, bias = layers_with_state(config, types), bool(config["attention_bias"])
    return {
        "names": BAMBA_NAMES,
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(config["mlp_bias"]),
        "states": _mamba2(config, carried) if any(carried) else None,
    }


def falcon_h1(config: Config) -> dict[str, Any]:
    """Falcon-H1: attention and Mamba 2 in parallel in every layer, with multipliers."""
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
        "names": BAMBA_NAMES,
        # The factors of queries and keys become one of their scores, that of values one of the
        # output.
        "attention_scale": head_size(config) ** -0.5 * input_scale * input_scale * keys,
        "attention_output_scale": input_scale * float(config["attention_out_multiplier"]),
        "mlp_gate_scale": gate_scale,
        "mlp_output_scale": mlp_scale,
        "embedding_scale": float(config["embedding_multiplier"]),
        "logit_scale": float(config["lm_head_multiplier"]),
        "states": states,
        "attends": layers,
    }


def zamba2(config: Config) -> dict[str, Any]:
    """Zamba 2: every layer is Mamba 2. Some layers are preceded by a block of attention and MLP,
    which use the weights of `num_mem_blocks` shared blocks in turns.
    """
    refuse(config, use_long_context=False, rms_norm_eps=1e-5)
    layers, types = int(config["num_hidden_layers"]), config["layers_block_type"]
    if len(types) != layers or (unknown := set(types) - {*STATE_LAYERS, "hybrid"}):
        kind = f"{len(types)} layers" if len(types) != layers else sorted(unknown)[0]
        raise ModelLoadError(
            f"config.json: layers_block_type: {kind!r} isn't supported with {layers} layers.",
            param="layers_block_type",
        )
    hybrid = [layer for layer, kind in enumerate(types) if kind == "hybrid"]
    blocks = size_field(config, "num_mem_blocks")
    sources = [-1] * layers
    for number, layer in enumerate(hybrid):
        sources[layer] = hybrid[number % blocks]
    states = _mamba2(config, (True,) * layers)
    limits = (float(config["time_step_min"]), math.inf)
    return {
        "names": _ZAMBA2,
        **({} if config["use_mem_rope"] else {"rope": None}),
        "attention_scale": (head_size(config) / 2) ** -0.5,
        "mlp_bias": bool(config["mamba_proj_bias"]),
        "states": replace(states, limits=limits),
        "attends": tuple(kind == "hybrid" for kind in types),
        "has_mlp": (False,) * layers,
        "shared": SharedBlockSpec(
            sources=tuple(sources),
            adapter_rank=size_field(config, "adapter_rank"),
            adapts_attention=bool(config["use_shared_attention_adapter"]),
        )
        if hybrid
        else None,
    }


def _zamba2_names(config: Config) -> Config:
    """Rename Zamba 2's fields. Attention is twice as wide as the hidden state."""
    names = {
        "n_mamba_heads": "mamba_n_heads",
        "mamba_ngroups": "mamba_n_groups",
        "add_bias_linear": "mamba_proj_bias",
    }
    renamed = {new: config[old] for old, new in names.items() if old in config}
    size = 2 * int(config["hidden_size"]) // int(config["num_attention_heads"])
    return {**config, **renamed, "head_dim": size, "mamba_d_head": "auto"}


def mamba2(config: Config) -> dict[str, Any]:
    """Mamba 2: every layer is a Mamba 2 mixer without an MLP."""
    refuse(config, hidden_act="silu")
    layers = (True,) * int(config["num_hidden_layers"])
    return {
        "names": BACKBONE_NAMES,
        "rope": None,
        "states": replace(_mamba2(config, layers), **_MIXER),
        "attends": (False,) * len(layers),
        "has_mlp": (False,) * len(layers),
    }


#: Names of a Mamba 2 mixer's weights in models with `BACKBONE_NAMES`.
_MIXER: dict[str, Any] = {
    "inputs": "mixer.in_proj",
    "conv": ("mixer.conv1d",),
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
    if unknown := set(types) - {*STATE_LAYERS, *ATTENTION_LAYERS, "mlp"}:
        raise ModelLoadError(
            f"config.json: layers_block_type: {sorted(unknown)[0]!r} isn't supported.",
            param="layers_block_type",
        )
    carries = tuple(kind in STATE_LAYERS for kind in types)
    limits = (float(config["time_step_min"]), math.inf)
    states = replace(_mamba2(config, carries), limits=limits, **_MIXER)
    return {
        "names": BACKBONE_NAMES,
        "rope": None,
        "activation": activation_of({"hidden_act": config["mlp_hidden_act"]}),
        "gated": False,
        "mlp_bias": bool(config["mlp_bias"]),
        "states": states if any(carries) else None,
        "attends": tuple(kind in ATTENTION_LAYERS for kind in types),
        "has_mlp": tuple(kind == "mlp" for kind in types),
    }


def _nemotron_h_names(config: Config) -> Config:
    """Rename sizes, and convert `hybrid_override_pattern` to `layers_block_type`."""
    states = _mamba2_sizes({name: value for name, value in config.items() if name != "head_dim"})
    config = {**config, **states}  # `head_dim` is the size of attention heads
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
    """Rename sizes to the names of other families, see `_MAMBA2_SIZES`."""
    renamed = {new: config[old] for old, new in _MAMBA2_SIZES.items() if old in config}
    return {**config, **renamed}


def _mamba2(config: Config, layers: tuple[bool, ...]) -> MambaSpec:
    heads = size_field(config, "mamba_n_heads")
    values = int(config.get("mamba_d_ssm") or config["mamba_expand"] * int(config["hidden_size"]))
    size = config.get("mamba_d_head", "auto")
    size = values // heads if size == "auto" else size_field(config, "mamba_d_head")
    if heads * size != values:
        raise BadModelConfig(
            f"config.json: mamba_n_heads ({heads}) heads of mamba_d_head ({size}) must have "
            f"mamba_d_ssm, or mamba_expand x hidden_size ({values}) values.",
            param="mamba_n_heads",
        )
    min_step, max_step = config.get("time_step_limit") or (0.0, math.inf)
    groups = divisor_field(config, "mamba_n_groups", heads, "mamba_n_heads")
    return MambaSpec(
        kind="mamba2",
        layers=layers,
        num_heads=heads,
        num_key_heads=groups,
        value_size=size,
        key_size=size_field(config, "mamba_d_state"),
        conv_width=size_field(config, "mamba_d_conv"),
        conv_bias=bool(config["mamba_conv_bias"]),
        bias=bool(config["mamba_proj_bias"]),
        limits=(_number(min_step), _number(max_step)),
    )


def _number(value: Any) -> float:
    """Convert a number of config.json, where `transformers` writes infinity as an object."""
    return float(value["__float__"] if isinstance(value, dict) else value)


#: A state doesn't limit the context. If config.json has no maximum, it is vLLM's.
ALL_MAMBA = {
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
    "Zamba2ForCausalLM": Family(
        zamba2,
        {
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "layers_block_type": [
                *["mamba"] * 6,
                *(["hybrid"] + ["mamba"] * 5) * 6,
                "hybrid",
                *["mamba"] * 4,
                "hybrid",
                *["mamba"] * 3,
                "hybrid",
                *["mamba"] * 2,
            ],
            "mamba_n_heads": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "time_step_min": 0.001,
            "num_mem_blocks": 1,
            "adapter_rank": 128,
            "use_shared_attention_adapter": False,
            "use_mem_rope": False,
        },
        _zamba2_names,
    ),
    "Mamba2ForCausalLM": Family(
        mamba2,
        {
            **ALL_MAMBA,
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
}
