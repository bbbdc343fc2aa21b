"""`quantization_param_path`: scales of an e4m3 KV cache in a JSON file, as vLLM's tools write it.

{"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.02,
"1": 0.03}}}}: by rank of tensor parallelism and layer, one number for keys and values, which are
divided by it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.contract.errors import ConfigError
from engine.models.cache import KVScales

PARAM = "quantization_param_path"
_DTYPE = "float8_e4m3fn"
#: Of a file: some thirty for each layer.
_MOST_BYTES = 1 << 20
_MOST = torch.finfo(torch.float32).max


def read_kv_scale_file(path: str, model_type: str, num_layers: int) -> list[KVScales]:
    """The scales of all layers. Raises `ConfigError` for a file that isn't of such a model."""
    whole = _object(_parsed(path), "the file")
    told = whole.get("model_type")
    if told is not None and told != model_type:
        raise _wrong(f"model_type is {_shown(told)}, but the model's is {model_type!r}")
    cache = _object(whole.get("kv_cache"), "kv_cache")
    if cache.get("dtype") != _DTYPE:
        raise _wrong(f"kv_cache.dtype is {_shown(cache.get('dtype'))}, not {_DTYPE!r}")
    ranks = _object(cache.get("scaling_factor"), "kv_cache.scaling_factor")
    if set(ranks) != {"0"}:
        raise _wrong(
            f"kv_cache.scaling_factor is of {len(ranks)} ranks: write it for one device, as rank 0"
        )
    at = "kv_cache.scaling_factor.0"
    layers = _object(ranks["0"], at)
    if set(layers) != {str(layer) for layer in range(num_layers)}:
        raise _wrong(f"{at} names {len(layers)} layers, which aren't 0 to {num_layers - 1}")
    return [_scale(f"{at}.{layer}", layers[str(layer)]) for layer in range(num_layers)]


def _parsed(path: str) -> Any:
    file = Path(path).expanduser()
    try:
        if not file.is_file():
            raise _wrong(f"there is no file {path!r}")
        with file.open("rb") as stream:
            text = stream.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise _wrong(f"the file has more than {_MOST_BYTES} bytes")
        return json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _wrong(f"{path!r} can't be read as JSON: {error}") from error


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(f"{name} must be an object")
    return value


def _scale(name: str, value: Any) -> KVScales:
    sound = type(value) in (int, float) and 0 < value <= _MOST
    kept = torch.tensor([float(value) if sound else 0.0])
    if float(kept) == 0:  # also of what float32 takes for nothing
        raise _wrong(f"{name} must be a positive finite number, not {_shown(value)}")
    return KVScales(kept, kept)


def _wrong(why: str) -> ConfigError:
    return ConfigError(f"{PARAM}: {why}.", param=PARAM)


def _shown(value: Any) -> str:
    return repr(value)[:60]
