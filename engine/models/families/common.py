"""`Family`, and functions that families share for reading a config.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.contract.errors import BadModelConfig, ModelLoadError
from engine.models.rotary_embedding import rope_spec

Config = dict[str, Any]
SpecBuilder = Callable[[Config], dict[str, Any]]

#: `hidden_act` in checkpoints -> the name of the kernels' activation.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
#: Layer types with a recurrent state, and those with attention.
STATE_LAYERS = ("mamba", "linear_attention")
ATTENTION_LAYERS = ("attention", "full_attention")
#: A field's name in older or other families -> the name used here.
ALIASES = {
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "n_inner": "intermediate_size",
    "ffn_dim": "intermediate_size",
    "ffn_hidden_size": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
    "seq_length": "max_position_embeddings",
    "padded_vocab_size": "vocab_size",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
    "hidden_activation": "hidden_act",
    "activation": "hidden_act",
    "layer_norm_eps": "rms_norm_eps",
    "layer_norm_epsilon": "rms_norm_eps",
    "norm_epsilon": "rms_norm_eps",
    "norm_eps": "rms_norm_eps",
    "num_local_experts": "num_experts",
    "rotary_pct": "partial_rotary_factor",
    "rope_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
}


@dataclass(frozen=True, slots=True)
class Family:
    """A model architecture.

    Attributes:
        build: converts a completed config.json to the fields of `DecoderSpec` that
            `common_fields` doesn't set or that differ.
        defaults: values of fields that a config.json of this family omits.
        prepare: converts fields that are specific to this family to the common ones.
    """

    build: SpecBuilder
    defaults: Config = field(default_factory=dict)
    prepare: Callable[[Config], Config] = dict

    def complete(self, config: Config) -> Config:
        """Return the config with common field names and the family's defaults."""
        config = self.prepare(config)
        renamed = {
            new: config[old]
            for old, new in ALIASES.items()
            if config.get(old) is not None and config.get(new) is None
        }
        present = {name: value for name, value in config.items() if value is not None}
        return {**self.defaults, **present, **renamed}


def common_fields(name: str, config: Config) -> dict[str, Any]:
    """Return the `DecoderSpec` fields that all families read from the same config fields."""
    layers = int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    head_dim = head_size(config)
    return {
        "architecture": name,
        "hidden_size": int(config["hidden_size"]),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "intermediate_size": int(config.get("intermediate_size") or 4 * config["hidden_size"]),
        "vocab_size": int(config["vocab_size"]),
        "max_position_embeddings": int(config["max_position_embeddings"]),
        "rope": rope_spec(config, rotary_dim(config, head_dim)),
        "sliding_windows": (0,) * layers,
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "activation": activation_of(config),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "eos_token_ids": _ids(config.get("eos_token_id")),
        "bos_token_id": config.get("bos_token_id"),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    }


def shared_fields(config: Config) -> Config:
    """Return the fields that a model with several parts has once, whatever its text part says."""
    names = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
    return {name: config[name] for name in names if config.get(name) is not None}


def head_size(config: Config) -> int:
    """Return the size of an attention head."""
    heads = int(config["num_attention_heads"])
    return int(config.get("head_dim") or config["hidden_size"] // heads)


def rotary_dim(config: Config, head_dim: int) -> int:
    """Return the number of dimensions of a head that are rotated.

    Raises `BadModelConfig` if `partial_rotary_factor` isn't from 0 to 1.
    """
    rope = config.get("rope_parameters") or {}
    factor = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    size = int(head_dim * float(factor))
    if not 0 <= size <= head_dim:
        raise BadModelConfig(
            f"config.json: partial_rotary_factor must be from 0 to 1, got {factor!r}.",
            param="partial_rotary_factor",
        )
    return size


def activation_of(config: Config) -> str:
    """Return the kernels' name of `hidden_act`. Raises `ModelLoadError` for an unknown one."""
    name = str(config.get("hidden_act", "silu"))
    if name not in ACTIVATIONS:
        raise ModelLoadError(
            f"config.json: hidden_act {name!r} isn't supported.", param="hidden_act"
        )
    return ACTIVATIONS[name]


def refuse(config: Config, **allowed: Any) -> None:
    """Raise `ModelLoadError` for a field that is set to another value than the allowed one."""
    for name, value in allowed.items():
        if config.get(name) is not None and config[name] != value:
            raise ModelLoadError(
                f"config.json: {name} = {config[name]!r} isn't supported for this architecture "
                f"(only {value!r}).",
                param=name,
            )


def windows_by_type(config: Config, default: list[str] | None = None) -> tuple[int, ...]:
    """Return each layer's sliding window by `layer_types`, or by `default` if the config has none;
    0 for full attention. Raises `ModelLoadError` for unknown types or a wrong number of them.
    """
    layers = int(config["num_hidden_layers"])
    types = config.get("layer_types") or default or ["full_attention"] * layers
    window = int(config.get("sliding_window") or 0)
    window_by_type = {"sliding_attention": window, "full_attention": 0}
    for kind in types:
        if kind not in window_by_type:
            raise ModelLoadError(
                f"config.json: layer_types: {kind!r} isn't supported.", param="layer_types"
            )
    if len(types) != layers:
        raise ModelLoadError(
            f"config.json: layer_types names {len(types)} layers of {layers}.", param="layer_types"
        )
    return tuple(window_by_type[kind] for kind in types)


def every_nth_full(config: Config, pattern: int) -> list[str]:
    """Return layer types in which every `pattern`-th layer has full attention and the others have
    a sliding window.
    """
    return [
        "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
        for layer in range(int(config["num_hidden_layers"]))
    ]


def window_everywhere(config: Config) -> tuple[int, ...]:
    """Return the same sliding window for every layer, unless the config has `layer_types`."""
    if config.get("layer_types"):
        return windows_by_type(config)
    return (int(config.get("sliding_window") or 0),) * int(config["num_hidden_layers"])


def alibi_slopes(heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """Return ALiBi's slopes (arXiv 2108.12409). If `heads` isn't a power of two, heads beyond it
    have slopes between those of the first heads.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-bias_max * (head + 1) / power) for head in range(power)]
    between = [2.0 ** (-bias_max * (head + 0.5) / power) for head in range(heads - power)]
    return tuple(slopes + between)


def layers_with_state(
    config: Config, default: list[str], carrying: tuple[str, ...] = STATE_LAYERS
) -> tuple[bool, ...]:
    """Return for each layer whether it has a state, which is so if its type is in `carrying`.

    The types are those of the config, or else of `default`, which has an item per layer. Raises
    `ModelLoadError` for unknown types or a wrong number of them.
    """
    types = config.get("layer_types") or config.get("layers_block_type") or default
    if len(types) != len(default):
        raise ModelLoadError(
            f"config.json: layer_types names {len(types)} layers of {len(default)}.",
            param="layer_types",
        )
    for kind in types:
        if kind not in (*carrying, *ATTENTION_LAYERS):
            raise ModelLoadError(
                f"config.json: layer_types: {kind!r} isn't supported.", param="layer_types"
            )
    return tuple(kind in carrying for kind in types)


def size_field(config: Config, name: str) -> int:
    """Return a size from 1 to 2^20 - 1. Raises `BadModelConfig` for others."""
    value = int(config[name])
    if not 1 <= value < 1 << 20:
        raise BadModelConfig(f"config.json: {name} must be from 1 to 2^20 - 1.", param=name)
    return value


def divisor_field(config: Config, name: str, total: int, of: str) -> int:
    """Return a size that divides `total`, the value of `of`. Raises `BadModelConfig` for others."""
    value = size_field(config, name)
    if total % value:
        raise BadModelConfig(
            f"config.json: {name} ({value}) must divide {of} ({total}).", param=name
        )
    return value


def _ids(value: Any) -> tuple[int, ...]:
    """Return an id, a list of ids or None as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
