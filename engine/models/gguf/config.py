"""A GGUF file's metadata as the config.json that `transformers` would have. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine.contract.errors import ModelLoadError
from engine.models.gguf import types
from engine.models.gguf.reader import Header

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_MODEL_TYPES = {"gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
BytesOf = Callable[[str], bytes]
"""A small tensor's bytes by its name."""
_DTYPES = {types.F32: "float32", types.F16: "float16", types.BF16: "bfloat16"}


class Metadata:
    """Values of a file's own architecture, with their types checked."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.architecture = architecture_of(header)

    def number(self, key: str, default: Any = None) -> Any:
        """A number. Raises `ModelLoadError` if it's none, or absent without a default."""
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelLoadError(f"The file lacks {self.architecture}.{key}.", param="model")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelLoadError(
                f"{self.architecture}.{key} must be a number, not {_shown(value)}.", param="model"
            )
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A number of things: at least 1. Raises as `number`."""
        value = self.number(key, default)
        if not isinstance(value, int) or not 1 <= value < 1 << 31:
            raise ModelLoadError(
                f"{self.architecture}.{key} must be from 1 to 2^31 - 1, not {_shown(value)}.",
                param="model",
            )
        return value

    def optional(self, key: str) -> Any:
        """A number, or None where there is none."""
        whole = f"{self.architecture}.{key}"
        return self.number(key) if whole in self.header.metadata else None

    def text(self, key: str) -> str:
        """A string, "" where there is none."""
        value = self.header.metadata.get(f"{self.architecture}.{key}", "")
        return value if isinstance(value, str) else ""


def architecture_of(header: Header) -> str:
    """Raises `ModelLoadError` for one that isn't read."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise ModelLoadError(
            f"GGUF files of the architecture {_shown(name)} aren't supported. "
            f"Known: {', '.join(_ARCHITECTURES)}.",
            param="model",
        )
    return name


def heads_of(header: Header) -> tuple[int, int]:
    """Query heads, and key/value heads."""
    values = Metadata(header)
    heads = values.count("attention.head_count")
    return heads, values.count("attention.head_count_kv", heads)


def make_config(header: Header, bytes_of: BytesOf) -> dict[str, Any]:
    """The config.json. Raises `ModelLoadError` naming what is missing or not supported."""
    values = Metadata(header)
    name, tensors = values.architecture, header.tensors
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
        "architectures": [_ARCHITECTURES[name]],
        "model_type": _MODEL_TYPES.get(name, name),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": _inner(values),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": values.count("context_length"),
        "rms_norm_eps": float(values.number("attention.layer_norm_rms_epsilon")),
        "hidden_act": "gelu_pytorch_tanh" if name.startswith("gemma") else "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "rope_theta": float(values.number("rope.freq_base", 10000.0)),
        "partial_rotary_factor": values.count("rope.dimension_count", head_dim) / head_dim,
        "dtype": _dtype(header),
        **_rope_scaling(values, bytes_of),
        **_windows(values, head_dim),
        **_experts(values),
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


def _windows(values: Metadata, head_dim: int) -> dict[str, Any]:
    """What Gemma 2 and 3 have of windows and soft caps, and Phi-3 of windows."""
    if values.architecture == "phi3":
        return {"sliding_window": values.optional("attention.sliding_window")}
    if values.architecture not in ("gemma2", "gemma3"):
        return {}
    found = {
        "sliding_window": values.optional("attention.sliding_window"),
        "attn_logit_softcapping": values.optional("attn_logit_softcapping"),
        "final_logit_softcapping": values.optional("final_logit_softcapping"),
        # Their largest models scale by another number, which llama.cpp knows by their depth.
        "query_pre_attn_scalar": head_dim,
    }
    if values.architecture == "gemma2" and values.count("block_count") == 46:
        found["query_pre_attn_scalar"] = 144  # 27B: hidden size 4608 / 32 heads
    if values.architecture == "gemma3" and values.count("block_count") == 62:
        found["query_pre_attn_scalar"] = 168  # 27B: hidden size 5376 / 32 heads
    return found


def _experts(values: Metadata) -> dict[str, Any]:
    """Of families with a mixture of experts. A llama with experts is a Mixtral.

    Whether the chosen experts' weights are brought to a sum of 1 is known by the architecture.
    """
    if values.optional("expert_count") is None:
        if any(name.endswith("_exps.weight") for name in values.header.tensors):
            raise ModelLoadError(
                f"The file has experts, but no {values.architecture}.expert_count.", param="model"
            )
        return {}
    count, used = values.count("expert_count"), values.count("expert_used_count")
    found = {"num_experts": count, "num_local_experts": count, "num_experts_per_tok": used}
    if values.architecture == "llama":
        return found | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    if values.architecture not in ("qwen2moe", "qwen3moe"):
        raise ModelLoadError(
            f"Experts of the architecture {values.architecture} aren't supported.", param="model"
        )
    found["moe_intermediate_size"] = values.count("expert_feed_forward_length")
    found["norm_topk_prob"] = values.architecture == "qwen3moe"
    if values.architecture == "qwen2moe":
        shared = values.count("expert_shared_feed_forward_length")
        found["shared_expert_intermediate_size"] = shared
    return found


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
    return {"rope_scaling": scaling}


def _shown(value: Any) -> str:
    """A value of the file, short enough for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
