"""A GGUF file's metadata as the config.json that `transformers` would have. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine.contract.errors import ModelLoadError
from engine.models.gguf import types
from engine.models.gguf.metadata import Metadata, heads_of
from engine.models.gguf.particulars import experts, particulars
from engine.models.gguf.reader import Header

BytesOf = Callable[[str], bytes]
"""A small tensor's bytes by its name."""
_DTYPES = {types.F32: "float32", types.F16: "float16", types.BF16: "bfloat16"}


def make_config(header: Header, bytes_of: BytesOf) -> dict[str, Any]:
    """The config.json. Raises `ModelLoadError` naming what is missing or not supported."""
    values = Metadata(header)
    name, family, tensors = values.architecture, values.family, header.tensors
    if "token_embd.weight" not in tensors:
        raise ModelLoadError("The file has no token_embd.weight.", param="model")
    heads, kv_heads = heads_of(header)
    hidden, layers = values.count("embedding_length"), values.count("block_count")
    if layers > len(tensors):
        raise ModelLoadError(
            f"{name}.block_count is {layers}, but there are {len(tensors)} tensors.", param="model"
        )
    head_dim = values.count("attention.key_length", hidden // heads)
    if values.count("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(
            "Keys and values of different lengths aren't supported.", param="model"
        )
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": _inner(values),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": values.count("context_length"),
        "rms_norm_eps": float(values.number(family.norm_eps)),
        "hidden_act": family.activation,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "rope_theta": float(values.number("rope.freq_base", 10000.0)),
        "partial_rotary_factor": values.count("rope.dimension_count", head_dim) / head_dim,
        "dtype": _dtype(header),
        **_rope_scaling(values, bytes_of),
        **experts(values),
        **particulars(values, head_dim),
    }


def _inner(values: Metadata) -> int:
    """Of an MLP; models all of whose layers have experts may leave it out."""
    return values.count("feed_forward_length", values.optional("expert_feed_forward_length"))


def _dtype(header: Header) -> str:
    """Of most floats in matrices; where all of them are quantised, for what is computed of them."""
    sizes: dict[str, int] = {}
    for info in header.tensors.values():
        if len(info.shape) > 1 and info.kind in _DTYPES:
            name = _DTYPES[info.kind]
            sizes[name] = sizes.get(name, 0) + info.nbytes
    return max(sizes, key=lambda name: sizes[name]) if sizes else "float16"


def _factors(values: Metadata, bytes_of: BytesOf, name: str) -> list[float] | None:
    """Numbers of a small tensor; None where there is none."""
    info = values.header.tensors.get(name)
    if info is None:
        return None
    if info.kind != types.F32:
        raise ModelLoadError(f"{name} must be F32.", param="model")
    return [float(factor) for factor in np.frombuffer(bytes_of(name), "<f4")]


def _long_rope(values: Metadata, bytes_of: BytesOf) -> dict[str, Any] | None:
    """Phi-3's factors for short and long contexts."""
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    short, long = (_factors(values, bytes_of, name) for name in names)
    if short is None or long is None:
        return None
    return {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": float(values.number("rope.scaling.attn_factor", 1.0)),
            "original_max_position_embeddings": values.count(
                "rope.scaling.original_context_length"
            ),
        }
    }


def _rope_scaling(values: Metadata, bytes_of: BytesOf) -> dict[str, Any]:
    """Llama 3's and Phi-3's factors are tensors; others have a kind and a factor."""
    long_rope = _long_rope(values, bytes_of)
    if long_rope is not None:
        return long_rope
    factors = _factors(values, bytes_of, "rope_freqs.weight")
    if factors is not None:
        return {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "attention_factor": 1.0,
                "original_max_position_embeddings": values.count("context_length"),
            }
        }
    kind = values.text("rope.scaling.type")
    factor = values.optional("rope.scaling.factor")
    if kind in ("", "none") or factor is None:
        return {}
    if kind not in ("linear", "yarn"):
        raise ModelLoadError(f"rope.scaling.type {kind!r} isn't supported.", param="model")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(factor)}
    original = values.optional("rope.scaling.original_context_length")
    if kind == "yarn" and original is not None:
        scaling["original_max_position_embeddings"] = values.count(
            "rope.scaling.original_context_length"
        )
    if values.architecture == "gpt-oss":
        scaling["truncate"] = False
    return {"rope_scaling": scaling}
