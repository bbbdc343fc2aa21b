"""A GGUF file's metadata converted to config.json. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.checkpoints.gguf import file as types
from engine.checkpoints.gguf.file import Header, Metadata, heads_of
from engine.contract.errors import ModelLoadError

# -- Fields of config.json that only some families have.


Fields = dict[str, Any]
log = logging.getLogger(__name__)
#: What converters write for an unlimited context, and the length that Granite 4 was trained for.
_ANY_CONTEXT, _GRANITE_CONTEXT = 1 << 20, 1 << 17


def experts(values: Metadata) -> Fields:
    """Return the fields of a mixture of experts. A Llama with experts is a Mixtral."""
    name = values.architecture
    if not values.optional("expert_count"):
        if any(name.endswith("_exps.weight") for name in values.header.tensors):
            raise ModelLoadError(f"The file has experts, but no {name}.expert_count.")
        return {}
    count, used = values.count("expert_count"), values.count("expert_used_count")
    fields: Fields = {"num_experts": count, "num_local_experts": count, "num_experts_per_tok": used}
    if name == "llama":
        return fields | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    if values.family.renormalize is None:
        raise ModelLoadError(f"Experts of the architecture {name} aren't supported.")
    fields["norm_topk_prob"] = values.family.renormalize
    if name in ("qwen2moe", "qwen3moe", "qwen3next"):
        fields["moe_intermediate_size"] = values.count("expert_feed_forward_length")
    if name in ("qwen2moe", "qwen3next"):
        shared = values.count("expert_shared_feed_forward_length")
        fields["shared_expert_intermediate_size"] = shared
    return fields


def family_fields(values: Metadata, head_dim: int) -> Fields:
    """Return a family's special fields. Raises `ModelLoadError` for unsupported values."""
    more = _MORE.get(values.architecture)
    return {} if more is None else more(values, head_dim)


def _window(values: Metadata, head_dim: int) -> Fields:
    """Phi-3, gpt-oss: the architecture determines which layers have a window."""
    return {"sliding_window": values.optional("attention.sliding_window")}


def _gemma2(values: Metadata, head_dim: int) -> Fields:
    """The largest models have another scale, which llama.cpp derives from their depth."""
    depth = values.count("block_count")
    scalar = {("gemma2", 46): 144, ("gemma3", 62): 168}.get((values.architecture, depth), head_dim)
    return {
        **_window(values, head_dim),
        "attn_logit_softcapping": values.optional("attn_logit_softcapping"),
        "final_logit_softcapping": values.optional("final_logit_softcapping"),
        "query_pre_attn_scalar": scalar,
    }


def _olmo2(values: Metadata, head_dim: int) -> Fields:
    """With sliding windows it is an OLMo 3."""
    window = values.optional("attention.sliding_window")
    if window is None:
        return {}
    flags = values.flags("attention.sliding_window_pattern", values.count("block_count"))
    fields: Fields = {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": window,
    }  # fmt: skip
    if flags is not None:
        kinds = {True: "sliding_attention", False: "full_attention"}
        fields["layer_types"] = [kinds[flag] for flag in flags]
    return fields


def _granite(values: Metadata, head_dim: int) -> Fields:
    scale = values.optional("attention.scale")
    return {
        "embedding_multiplier": float(values.number("embedding_scale", 1.0)),
        "residual_multiplier": float(values.number("residual_scale", 1.0)),
        "attention_multiplier": head_dim**-0.5 if scale is None else float(scale),
        "logits_scaling": float(values.number("logit_scale", 1.0)),
    }


def _granite_moe(values: Metadata, head_dim: int) -> Fields:
    """With an MLP beside the experts it is a Granite 4 with attention in all layers."""
    fields = _granite(values, head_dim)
    if not values.has("blk.0.ffn_up_shexp.weight"):
        return fields
    return fields | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["attention"] * values.count("block_count"),
        "position_embedding_type": "rope",
        "shared_intermediate_size": _rows(values, "blk.0.ffn_up_shexp.weight"),
    }


def _granite_hybrid(values: Metadata, head_dim: int) -> Fields:
    """Granite 4. Without experts its checkpoints call the MLP the shared one."""
    layers, hidden = values.count("block_count"), values.count("embedding_length")
    heads, inner = values.count("ssm.time_step_rank"), values.count("ssm.inner_size")
    shared = "blk.0.ffn_up_shexp.weight"
    kinds = {True: "mamba", False: "attention"}
    carrying = [values.has(f"blk.{layer}.ssm_in.weight") for layer in range(layers)]
    first = carrying.index(True) if any(carrying) else 0
    rotated = bool(values.header.metadata.get("granitehybrid.rope.scaling.finetuned", True))
    fields = {
        "num_experts": 0,
        "num_local_experts": 0,
        "layer_types": [kinds[carries] for carries in carrying],
        "position_embedding_type": "rope" if rotated else "nope",
        "max_position_embeddings": _granite_context(values, rotated),
        "shared_intermediate_size": _rows(
            values, shared if values.has(shared) else "blk.0.ffn_up.weight"
        ),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // hidden if inner % hidden == 0 else inner / hidden,
        "mamba_n_groups": values.count("ssm.group_count"),
        "mamba_d_state": values.count("ssm.state_size"),
        "mamba_d_conv": values.count("ssm.conv_kernel"),
        "mamba_conv_bias": values.has(f"blk.{first}.ssm_conv1d.bias"),
        "mamba_proj_bias": values.has(f"blk.{first}.ssm_in.bias"),
    }
    return {**_granite(values, head_dim), **fields, **experts(values)}


def _granite_context(values: Metadata, rotated: bool) -> int:
    """Without rotary embedding converters write 2^20 for an unlimited context."""
    context_length = values.count("context_length")
    if rotated or context_length != _ANY_CONTEXT:
        return context_length
    log.info(
        "The file's context of %d tokens stands for any length. %d are served, those that Granite "
        "4 is made for; hf_overrides with max_position_embeddings sets another number.",
        context_length, _GRANITE_CONTEXT,
    )  # fmt: skip
    return _GRANITE_CONTEXT


def _qwen3_next(values: Metadata, head_dim: int) -> Fields:
    """A file's last layers may be those that guess further tokens, which aren't run."""
    layers = values.count("block_count") - values.number("nextn_predict_layers", 0)
    if layers < 1:
        raise ModelLoadError(f"qwen3next.block_count leaves {layers} layers.")
    kinds = {True: "full_attention", False: "linear_attention"}
    heads = values.count("ssm.time_step_rank")
    return {
        "num_hidden_layers": layers,
        "layer_types": [kinds[values.has(f"blk.{layer}.attn_q.weight")] for layer in range(layers)],
        "mlp_only_layers": [
            layer for layer in range(layers) if not values.has(f"blk.{layer}.ffn_gate_inp.weight")
        ],
        "decoder_sparse_step": 1,
        "linear_num_value_heads": heads,
        "linear_num_key_heads": values.count("ssm.group_count"),
        "linear_value_head_dim": values.count("ssm.inner_size") // heads,
        "linear_key_head_dim": values.count("ssm.state_size"),
        "linear_conv_kernel_dim": values.count("ssm.conv_kernel"),
    }


def _rows(values: Metadata, name: str) -> int:
    """Return a tensor's number of rows. Raises `ModelLoadError` if it is missing."""
    info = values.header.tensors.get(name)
    if info is None:
        raise ModelLoadError(f"The file has no {name}.")
    return info.shape[0]


def _minicpm(values: Metadata, head_dim: int) -> Fields:
    """Older files lack the scales. Raises `ModelLoadError` for these."""
    for name in ("embedding_scale", "residual_scale", "logit_scale"):
        values.number(name)
    return _granite(values, head_dim)


def _glm4(values: Metadata, head_dim: int) -> Fields:
    return {"attention_bias": values.has("blk.0.attn_q.bias")}


def _glm4moe(values: Metadata, head_dim: int) -> Fields:
    """A file's last layers may be those that guess further tokens, which aren't run."""
    layers, first = values.count("block_count"), values.number("leading_dense_block_count", 0)
    layers -= values.number("nextn_predict_layers", 0)
    if not isinstance(first, int) or not 0 <= first <= layers or layers < 1:
        raise ModelLoadError(f"glm4moe.leading_dense_block_count is {first!r} of {layers} layers.")
    return {
        "num_hidden_layers": layers,
        "first_k_dense_replace": first,
        "n_routed_experts": values.count("expert_count"),
        "n_shared_experts": values.count("expert_shared_count", 1),
        "moe_intermediate_size": values.count("expert_feed_forward_length"),
        "routed_scaling_factor": float(values.number("expert_weights_scale", 1.0)),
        "norm_topk_prob": bool(values.header.metadata.get("glm4moe.expert_weights_norm", True)),
        "attention_bias": values.has("blk.0.attn_q.bias"),
        "use_qk_norm": values.has("blk.0.attn_q_norm.weight"),
    }


def _command_r(values: Metadata, head_dim: int) -> Fields:
    return {
        "logit_scale": float(values.number("logit_scale")),
        "use_qk_norm": values.has("blk.0.attn_q_norm.weight"),
    }


def _cohere2(values: Metadata, head_dim: int) -> Fields:
    return {
        "logit_scale": float(values.number("logit_scale")),
        "sliding_window": values.count("attention.sliding_window"),
    }


def _stablelm(values: Metadata, head_dim: int) -> Fields:
    if values.has("blk.0.attn_q_norm.weight"):
        raise ModelLoadError(
            "A StableLM whose queries are normed isn't read from GGUF: take its safetensors."
        )
    return {
        "use_qkv_bias": values.has("blk.0.attn_q.bias"),
        "use_parallel_residual": not values.has("blk.0.ffn_norm.weight"),
    }


def _starcoder2(values: Metadata, head_dim: int) -> Fields:
    return {"use_bias": values.has("blk.0.attn_q.bias")}


_MORE: dict[str, Callable[[Metadata, int], Fields]] = {
    "phi3": _window,
    "gpt-oss": _window,
    "gemma2": _gemma2,
    "gemma3": _gemma2,
    "olmo2": _olmo2,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "granitehybrid": _granite_hybrid,
    "qwen3next": _qwen3_next,
    "minicpm": _minicpm,
    "glm4": _glm4,
    "glm4moe": _glm4moe,
    "command-r": _command_r,
    "cohere2": _cohere2,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}


BytesOf = Callable[[str], bytes]
"""Returns a small tensor's bytes by its name."""
_DTYPES = {types.F32: "float32", types.F16: "float16", types.BF16: "bfloat16"}


def make_config(header: Header, bytes_of: BytesOf) -> dict[str, Any]:
    """Make config.json. Raises `ModelLoadError` naming a missing or unsupported value."""
    values = Metadata(header)
    name, family, tensors = values.architecture, values.family, header.tensors
    if "token_embd.weight" not in tensors:
        raise ModelLoadError("The file has no token_embd.weight.")
    heads, kv_heads = heads_of(header)
    hidden, layers = values.count("embedding_length"), values.count("block_count")
    if layers > len(tensors):
        raise ModelLoadError(
            f"{name}.block_count is {layers}, but there are {len(tensors)} tensors."
        )
    head_dim = values.count("attention.key_length", hidden // heads)
    if values.count("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError("Keys and values of different lengths aren't supported.")
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
        **family_fields(values, head_dim),
    }


def _inner(values: Metadata) -> int:
    """Return the MLP's inner size, which models with experts in all layers may omit."""
    return values.count("feed_forward_length", values.optional("expert_feed_forward_length"))


def _dtype(header: Header) -> str:
    """Return the most frequent float dtype of matrices; a default if all are quantized."""
    sizes: dict[str, int] = {}
    for info in header.tensors.values():
        if len(info.shape) > 1 and info.kind in _DTYPES:
            name = _DTYPES[info.kind]
            sizes[name] = sizes.get(name, 0) + info.nbytes
    return max(sizes, key=lambda name: sizes[name]) if sizes else "float16"


def _factors(values: Metadata, bytes_of: BytesOf, name: str) -> list[float] | None:
    """Return the numbers of a small tensor; None if it is missing."""
    info = values.header.tensors.get(name)
    if info is None:
        return None
    if info.kind != types.F32:
        raise ModelLoadError(f"{name} must be F32.")
    return [float(factor) for factor in np.frombuffer(bytes_of(name), "<f4")]


def _long_rope(values: Metadata, bytes_of: BytesOf) -> dict[str, Any] | None:
    """Return Phi-3's factors for short and long contexts."""
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
    """Return rope scaling: tensors of factors for Llama 3 and Phi-3, else a type and a factor."""
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
        raise ModelLoadError(f"rope.scaling.type {kind!r} isn't supported.")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(factor)}
    original = values.optional("rope.scaling.original_context_length")
    if kind == "yarn" and original is not None:
        scaling["original_max_position_embeddings"] = values.count(
            "rope.scaling.original_context_length"
        )
    if values.architecture == "gpt-oss":
        scaling["truncate"] = False
    return {"rope_scaling": scaling}
