"""Settings of how a checkpoint is read: load formats, quantization, generation defaults."""

from __future__ import annotations

from typing import Any

from engine.contract.errors import ConfigError, InvalidRequest
from engine.contract.sampling_params import SamplingParams

PARAM = "override_generation_config"
#: Sampling defaults that `override_generation_config` or a generation_config.json may set.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
#: Token ids that end an output.
_EOS = "eos_token_id"


def check_overrides(overrides: dict[str, Any]) -> None:
    """Raise `ConfigError` for an unsupported name or a value out of its range."""
    for name, value in overrides.items():
        if name == _EOS:
            ids = value if isinstance(value, list) else [value]
            if not ids or any(type(token_id) is not int or token_id < 0 for token_id in ids):
                raise ConfigError(f"{PARAM}: {name} must be token ids, got {value!r}.", param=PARAM)
            continue
        if name not in SAMPLING_DEFAULTS:
            allowed = ", ".join((*SAMPLING_DEFAULTS, _EOS))
            raise ConfigError(f"{PARAM} may hold {allowed}; got {name!r}.", param=PARAM)
        try:
            SamplingParams(**{name: value})
        except InvalidRequest as error:
            raise ConfigError(f"{PARAM}: {error.message}", param=PARAM) from None


#: Methods that quantize the weights of any checkpoint while they load.
ONLINE_METHODS = ("int8", "int4", "fp8")
#: vLLM's names for them.
SAME_METHODS = {"deepspeedfp": "fp8"}
#: vLLM's name of a format, or of a kernel for one -> matching formats of the checkpoint.
CHECKPOINT_METHODS: dict[str, tuple[str, ...]] = {
    "aqlm": ("aqlm",),
    "auto_awq": ("awq",),
    "auto_gptq": ("gptq",),
    "awq": ("awq",),
    "awq_marlin": ("awq",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "fbgemm_fp8": ("fp8",),
    "gguf": ("gguf",),
    "gpt_oss_mxfp4": ("mxfp4",),
    "gptq": ("gptq",),
    "gptq_marlin": ("gptq", "marlin"),
    "gptq_marlin_24": ("gptq_marlin_24",),
    "hqq": ("hqq",),
    "inc": ("awq", "gptq"),
    "ipex": ("awq", "gptq"),
    "marlin": ("marlin",),
    "modelopt": ("modelopt",),
    "modelopt_fp4": ("modelopt",),
    "modelopt_mixed": ("modelopt",),
    "modelopt_mxfp8": ("modelopt",),
    "moe_wna16": ("awq", "gptq"),
    "mxfp4": ("mxfp4",),
    "squeezellm": ("squeezellm",),
    "torchao": ("torchao",),
}
_AT_LOAD = "it rounds plain weights while they load: use fp8, int8 or int4"
#: Unsupported methods of vLLM -> what to use instead.
REFUSED_METHODS = {
    "bitblas": "take the GPTQ checkpoint that it is made of",
    "deepseek_v4_fp8": "take a GPTQ or AWQ checkpoint of the model",
    "experts_int8": "it rounds plain weights while they load: use int8",
    "fp8_per_block": _AT_LOAD,
    "fp8_per_channel": _AT_LOAD,
    "fp8_per_tensor": _AT_LOAD,
    "fp_quant": "take the FP8, NVFP4, GPTQ or AWQ checkpoint of the model",
    "gptq_bitblas": "take the GPTQ checkpoint that it is made of",
    "humming": "it names kernels of a GPU, not a format: use the checkpoint's own, or leave it out",
    "int8_per_channel_weight_only": _AT_LOAD,
    "mxfp8": _AT_LOAD,
    "neuron_quant": "it is for another device: use int8",
    "nvfp4_per_token": _AT_LOAD,
    "online": _AT_LOAD,
    "ptpc_fp8": "it rounds plain weights while they load: use fp8 or int8",
    "qqq": "take the GPTQ or the compressed-tensors checkpoint of the model",
    "quark": "take the FP8, GPTQ or AWQ checkpoint of the model",
    "tpu_int8": "it is for another device: use int8",
}
QUANTIZATIONS = (*ONLINE_METHODS, *CHECKPOINT_METHODS)


LOAD_FORMATS = (
    "auto", "safetensors", "pt", "npcache", "sharded_state", "tensorizer", "bitsandbytes", "dummy",
)  # fmt: skip
#: vLLM's names of other readers of the same files -> our name.
SAME_FORMATS = {
    "hf": "auto",
    "fastsafetensors": "safetensors",
    "instanttensor": "safetensors",
    "runai_streamer": "safetensors",
}
#: Unsupported formats of vLLM -> what to do instead.
OTHER_FORMATS = {
    "gguf": "leave it out: a GGUF file is known by its name",
    "mistral": "take the folder in the hub's format, with config.json",
    "runai_streamer_sharded": "mount the bucket and give a folder",
    "modelexpress": "mount the weights and give a folder",
    "ipc_cache": "put the model to sleep instead of ending it, for fast starts",
    "npccache": "the word is npcache",
}
_KINDS = {str: "a text", int: "a number from 1 to 64", bool: "true or false"}
#: Keys of `model_loader_extra_config` by load_format.
_LOADER_KEYS: dict[str, dict[str, type]] = {
    "sharded_state": {"pattern": str},
    "tensorizer": {
        "tensorizer_uri": str,
        "encryption_keyfile": str,
        "num_readers": int,
        "verify_hash": bool,
    },
}


def resolve_load_format(name: Any, extra: Any) -> Any:
    """Return our name of a load format.

    Args:
        extra: `model_loader_extra_config`, unchecked.

    Raises:
        ConfigError: an unsupported format, or an unknown key of `extra`.
    """
    name = SAME_FORMATS.get(str(name), name)
    other = OTHER_FORMATS.get(str(name))
    if other is not None:
        raise ConfigError(f"load_format={name} can't be used: {other}.", param="load_format")
    key_types = _LOADER_KEYS.get(str(name), {})
    for key, value in extra.items() if isinstance(extra, dict) else ():
        kind = key_types.get(key)
        out_of_range = kind is int and not (type(value) is int and 1 <= value <= 64)
        if kind is None or type(value) is not kind or out_of_range:
            allowed = [
                f"{key_name} ({_KINDS[key_types[key_name]]})" for key_name in sorted(key_types)
            ]
            raise ConfigError(
                f"model_loader_extra_config: load_format={name} takes "
                f"{' and '.join(allowed) or 'no settings'}, not {key}={value!r}.",
                param="model_loader_extra_config",
            )
    return name


def resolve_quantization(load_format: Any, name: Any) -> tuple[Any, Any]:
    """Return our names of a load format and a method of quantization; names are case-insensitive.

    Raises:
        ConfigError: an unsupported method, or one that the format excludes.
    """
    if isinstance(name, str):
        name = SAME_METHODS.get(name.lower(), name.lower())
    other = REFUSED_METHODS.get(str(name))
    if other is not None:
        raise ConfigError(f"quantization={name!r} can't be used: {other}.", param="quantization")
    if load_format != "bitsandbytes":
        return load_format, name
    if name not in (None, "bitsandbytes"):
        raise ConfigError(
            f"load_format=bitsandbytes can't be used with quantization={name!r}. Leave one of them "
            "out.",
            param="load_format",
        )
    return "auto", "bitsandbytes"
