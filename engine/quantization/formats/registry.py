"""Selects the format that reads a checkpoint, by its `quant_method`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.quantization.formats.base import CheckpointFormat, ConfigFields
from engine.quantization.formats.bitsandbytes import BitsAndBytes
from engine.quantization.formats.codebook import AQLM, SqueezeLLM
from engine.quantization.formats.compressed_tensors import CompressedTensors, has_weights
from engine.quantization.formats.fp4 import MXFP4, ModelOpt
from engine.quantization.formats.fp8 import FP8
from engine.quantization.formats.gptq import AWQ, GPTQ
from engine.quantization.formats.hqq import HQQ
from engine.quantization.formats.marlin import Marlin, Marlin24
from engine.quantization.formats.torchao import TorchAO

_PATH = "quantization_config"
FORMATS: dict[str, type[CheckpointFormat]] = {
    form.name: form
    for form in (
        AQLM, AWQ, BitsAndBytes, CompressedTensors, FP8, GPTQ, HQQ, Marlin, Marlin24, ModelOpt,
        MXFP4, SqueezeLLM, TorchAO,
    )
}  # fmt: skip
#: Maximum length of a field's value in a message.
_MAX_MESSAGE_CHARS = 80
#: Other names of the same formats.
_ALIASES = {
    "fbgemm_fp8": "fp8",
    "modelopt_fp4": "modelopt",
    "nvfp4": "modelopt",
    "gptq_marlin": "gptq",
    "gptqmodel": "gptq",
    "sparseml": "compressed-tensors",
}
_LOADING_ONLY = (
    "it is a way of loading plain weights, not of keeping them: remove quantization_config, and "
    "round them with --quantization fp8, int8 or int4"
)
#: Unsupported methods, and what to use instead.
_REFUSED = {
    "gptq_bitblas": "take the GPTQ checkpoint that it is made of",
    "bitblas": "take the GPTQ checkpoint that it is made of",
    "qqq": "take the GPTQ or the compressed-tensors W4A16 checkpoint of the model",
    "deepspeedfp": _LOADING_ONLY,
    "tpu_int8": _LOADING_ONLY,
    "experts_int8": _LOADING_ONLY,
    "neuron_quant": _LOADING_ONLY,
    "quark": "take the FP8, GPTQ or AWQ checkpoint of the model",
    "bitnet": "take the GGUF file of the model",
    "gguf": "name the .gguf file as the model",
    "eetq": "take the plain checkpoint with --quantization int8",
    "quanto": "take the plain checkpoint with --quantization int8 or int4",
    "higgs": "take the GPTQ or AWQ checkpoint of the model",
    "vptq": "take the GPTQ or AWQ checkpoint of the model",
    "spqr": "take the GPTQ or AWQ checkpoint of the model",
}


def register_format(form: type[CheckpointFormat]) -> None:
    """Read checkpoints whose `quant_method` is the format's name; see docs/extending.md."""
    FORMATS[form.name] = form


def quantization_config_of(config: Mapping[str, Any]) -> Any:
    """Return the quantization config in a config.json, wherever it is; the text model's counts.

    Older versions of compressed-tensors have it as `compression_config`, also nested.
    """
    for section in (config, config.get("text_config")):
        fields = _config_within(section) if isinstance(section, Mapping) else None
        if fields:
            return fields
    return None


def _config_within(section: Mapping[str, Any]) -> Any:
    fields = section.get(_PATH) or section.get("compression_config")
    inner = fields.get(_PATH) if isinstance(fields, Mapping) else None
    if not isinstance(fields, Mapping) or not isinstance(inner, Mapping):
        return fields
    return {"quant_method": CompressedTensors.name, **fields, **inner}


def find_format(quantization_config: Any) -> CheckpointFormat | None:
    """Return the format of a config.json's `quantization_config`; None: unquantized weights.

    Raises `ModelLoadError` for an unsupported one, with what to use instead.
    """
    if not quantization_config:
        return None
    fields = ConfigFields(quantization_config, _PATH)
    method = method_of(quantization_config)
    if method in ("compressed-tensors", "modelopt") and _quantizes_only_kv(quantization_config):
        return None
    form = FORMATS.get(method)
    if form is not None:
        return form(fields)
    if method in _REFUSED:
        raise fields.error("quant_method", f"is {method!r}, which isn't read: {_REFUSED[method]}")
    supported = ", ".join(sorted(FORMATS))
    method_name = quantization_config.get("quant_method")
    reported_name = "missing" if method_name is None else repr(method_name)[:_MAX_MESSAGE_CHARS]
    raise fields.error("quant_method", f"is {reported_name}; read are {supported}")


def method_of(quantization_config: Mapping[str, Any]) -> str:
    """Return the method's name among `FORMATS`; "" if it isn't there."""
    method_name = quantization_config.get("quant_method")
    if not isinstance(method_name, str):
        return ""
    method = (
        method_name.lower().replace("_", "-")
        if method_name.startswith("compressed")
        else method_name.lower()
    )
    if method in ("auto-round", "auto_round", "intel/auto-round"):
        packing = str(quantization_config.get("packing_format") or "")
        return "awq" if "awq" in packing else "gptq"
    method = _ALIASES.get(method, method)
    if method == GPTQ.name:
        layout = quantization_config.get("checkpoint_format")
        if layout == "marlin_24":
            return Marlin24.name
        if layout == "marlin" or quantization_config.get("is_marlin_format") is True:
            return Marlin.name
    return method


def _quantizes_only_kv(config: Mapping[str, Any]) -> bool:
    """Whether no weight is quantized: scales of the KV cache are ordinary tensors."""
    if method_of(config) == "compressed-tensors":
        sparsity = config.get("sparsity_config") or {}
        is_dense = isinstance(sparsity, Mapping) and sparsity.get("format", "dense") == "dense"
        return is_dense and not has_weights(config)
    inner = config.get("quantization") or config
    return isinstance(inner, Mapping) and "quant_algo" in inner and inner["quant_algo"] is None
