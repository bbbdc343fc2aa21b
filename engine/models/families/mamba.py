"""Families of Mamba 1, with and without attention layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.decoder_spec import MambaSpec, MoeSpec
from engine.models.families.common import (
    Config,
    Family,
    refuse,
    size_field,
)
from engine.models.families.mamba2 import ALL_MAMBA, BACKBONE_NAMES, BAMBA_NAMES


def mamba(config: Config) -> dict[str, Any]:
    """Mamba: every layer is a Mamba mixer without an MLP."""
    refuse(config, hidden_act="silu")
    layers = (True,) * int(config["num_hidden_layers"])
    values = int(config["expand"] * int(config["hidden_size"]))
    return {
        "names": BACKBONE_NAMES,
        "rope": None,
        "states": _mamba1(
            layers,
            "mixer.",
            values=size_field({"intermediate_size": values, **config}, "intermediate_size"),
            keys=size_field(config, "state_size"),
            rank=_rank(config, "time_step_rank"),
            conv_width=size_field(config, "conv_kernel"),
            conv_bias=bool(config["use_conv_bias"]),
            bias=bool(config["use_bias"]),
        ),
        "attends": (False,) * len(layers),
        "has_mlp": (False,) * len(layers),
    }


def jamba(config: Config) -> dict[str, Any]:
    """Jamba: most layers are Mamba with norms, the others have attention; some have experts."""
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
        keys=size_field(config, "mamba_d_state"),
        rank=_rank(config, "mamba_dt_rank"),
        conv_width=size_field(config, "mamba_d_conv"),
        conv_bias=bool(config["mamba_conv_bias"]),
        bias=bool(config["mamba_proj_bias"]),
    )
    norms: dict[str, Any] = {
        "dt_norm": "mamba.dt_layernorm",
        "key_norm": "mamba.b_layernorm",
        "query_norm": "mamba.c_layernorm",
    }
    return {
        "names": BAMBA_NAMES,
        "rope": None,
        "moe": moe if moe.num_experts > 1 and any(experts) else None,
        "states": replace(states, **norms) if any(carries) else None,
    }


def _every_nth(config: Config, name: str, layers: range) -> tuple[bool, ...]:
    """Return for each layer whether it is `name`_offset after a multiple of `name`_period."""
    period, offset = size_field(config, f"{name}_period"), int(config[f"{name}_offset"])
    return tuple(layer % period == offset for layer in layers)


def _rank(config: Config, name: str) -> int:
    """Return the rank of Mamba's time steps; "auto" is hidden_size / 16, rounded up."""
    if config[name] == "auto":
        return -(-int(config["hidden_size"]) // 16)
    return size_field(config, name)


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
        conv=(f"{prefix}conv1d",),
        decay=f"{prefix}A_log",
        rate_bias=f"{prefix}dt_proj.bias",
        skip=f"{prefix}D",
        gated_norm="",
        output=f"{prefix}out_proj",
        **fields,
    )


FAMILIES = {
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
    "MambaForCausalLM": Family(
        mamba,
        {
            **ALL_MAMBA,
            "tie_word_embeddings": True,
            "state_size": 16,
            "expand": 2,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "use_bias": False,
            "time_step_rank": "auto",
        },
    ),
}
