"""`load_format`: how a checkpoint's weights are read, by vLLM's names."""

from __future__ import annotations

from typing import Any

from engine.contract.errors import ConfigError

LOAD_FORMATS = ("auto", "safetensors", "pt", "npcache", "sharded_state", "tensorizer", "dummy")
#: vLLM's names for other readers of the same files.
SAME_FORMATS = {
    "hf": "auto",
    "fastsafetensors": "safetensors",
    "instanttensor": "safetensors",
    "runai_streamer": "safetensors",
}
#: Formats of vLLM's that are something else here.
OTHER_FORMATS = {
    "gguf": "leave it out: a GGUF file is known by its name",
    "bitsandbytes": "leave it out: config.json tells of such a checkpoint; --quantization "
    "int8 or int4 rounds any other while it loads",
    "mistral": "take the folder in the hub's format, with config.json",
    "runai_streamer_sharded": "mount the bucket and give a folder",
    "modelexpress": "mount the weights and give a folder",
    "ipc_cache": "put the model to sleep instead of ending it, for fast starts",
    "npccache": "the word is npcache",
}
#: Of `model_loader_extra_config`, by load_format.
_KINDS = {str: "a text", int: "a number from 1 to 64", bool: "true or false"}
_LOADER_KEYS: dict[str, dict[str, type]] = {
    "sharded_state": {"pattern": str},
    "tensorizer": {
        "tensorizer_uri": str,
        "encryption_keyfile": str,
        "num_readers": int,
        "verify_hash": bool,
    },
}


def checked_format(name: Any, extra: Any) -> Any:
    """The format by our name. Raises `ConfigError` for one that can't be had, and for keys that it
    lacks.

    Args:
        extra: `model_loader_extra_config`, as it was given.
    """
    name = SAME_FORMATS.get(str(name), name)
    other = OTHER_FORMATS.get(str(name))
    if other is not None:
        raise ConfigError(f"load_format={name} can't be used: {other}.", param="load_format")
    known = _LOADER_KEYS.get(str(name), {})
    for key, value in extra.items() if isinstance(extra, dict) else ():
        kind = known.get(key)
        number = kind is int and not (type(value) is int and 1 <= value <= 64)
        if kind is None or type(value) is not kind or number:
            words = [f"{each} ({_KINDS[known[each]]})" for each in sorted(known)]
            raise ConfigError(
                f"model_loader_extra_config: load_format={name} takes "
                f"{' and '.join(words) or 'no settings'}, not {key}={value!r}.",
                param="model_loader_extra_config",
            )
    return name
