"""From a checkpoint's `config.json` to a `DecoderSpec`: one small function a family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError
from engine.layers.rotary import rope_spec
from engine.models.spec import DecoderSpec

SpecBuilder = Callable[[dict[str, Any]], dict[str, Any]]


def read_config(folder: str | Path) -> dict[str, Any]:
    """A model folder's config.json. Raises `ModelLoadError` if it's missing or no object."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"{path} can't be read: {error.strerror or error}."
        raise ModelLoadError(reason, param="model") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is no JSON: {error}.", param="model") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} must hold a JSON object.", param="model")
    return config


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    """The spec of a config.json. Raises `ModelLoadError` for what the native decoder can't run."""
    names = config.get("architectures") or []
    name = next((name for name in names if name in _FAMILIES), None)
    if name is None:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelLoadError(
            f"The architecture {', '.join(names) or '(none)'} isn't supported. Known: {known}.",
            param="model",
        )
    try:
        return DecoderSpec(**_common(name, config), **_FAMILIES[name](config))
    except KeyError as error:
        reason = f"config.json of {name} lacks {error.args[0]!r}."
        raise ModelLoadError(reason, param="model") from error


def register_decoder(name: str, builder: SpecBuilder) -> None:
    """Teach the native decoder an architecture; `builder` maps config.json to extra spec fields."""
    _FAMILIES[name] = builder


def _common(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Fields that every family of this shape has under the same names."""
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    rotary_dim = int(head_dim * float(config.get("partial_rotary_factor") or 1.0))
    activation = str(config.get("hidden_act", "silu"))
    if activation not in ("silu", "swish"):
        raise ModelLoadError(f"config.json: hidden_act {activation!r} isn't supported for {name}.")
    return {
        "architecture": name,
        "hidden_size": int(config["hidden_size"]),
        "num_layers": int(config["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "intermediate_size": int(config["intermediate_size"]),
        "vocab_size": int(config["vocab_size"]),
        "max_position_embeddings": int(config["max_position_embeddings"]),
        "rope": rope_spec(config, rotary_dim),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "eos_token_ids": _ids(config.get("eos_token_id")),
        "bos_token_id": config.get("bos_token_id"),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    }


def _ids(value: Any) -> tuple[int, ...]:
    """An id, a list of ids or None as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _llama(config: dict[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "windows": (0,) * int(config["num_hidden_layers"]),
    }


def _mistral(config: dict[str, Any]) -> dict[str, Any]:
    window = int(config.get("sliding_window") or 0)
    return {"windows": (window,) * int(config["num_hidden_layers"])}


def _qwen2(config: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": _qwen_windows(config)}


def _qwen3(config: dict[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    windows = _qwen_windows(config)
    return {"qk_norm": True, "qkv_bias": bias, "o_bias": bias, "windows": windows}


def _qwen_windows(config: dict[str, Any]) -> tuple[int, ...]:
    """Qwen's windows: by `layer_types`, or on layers from `max_window_layers` on."""
    layers = int(config["num_hidden_layers"])
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0
    types = config.get("layer_types")
    if types:
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    first = int(config.get("max_window_layers", layers))
    return tuple(window if layer >= first else 0 for layer in range(layers))


_FAMILIES: dict[str, SpecBuilder] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
