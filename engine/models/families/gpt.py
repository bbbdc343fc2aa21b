"""Families with learned positions or ALiBi: GPT-2 and its successors, OPT, BLOOM and MPT.

GPT-J is here, too, which has rotary embedding, but similar names of weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine.models.decoder_spec import WeightNames
from engine.models.families.common import Config, Family, alibi_slopes, refuse
from engine.models.rotary_embedding import rope_spec

_TRANSFORMER = WeightNames(
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}.",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
)
GPT2 = replace(
    _TRANSFORMER,
    optional_prefix="transformer.",
    positions="transformer.wpe",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
)
GPT_NEO = replace(
    GPT2,
    qkv=tuple(f"attn.attention.{name}_proj" for name in "qkv"),
    o="attn.attention.out_proj",
)
GPTJ = replace(
    _TRANSFORMER,
    mlp_norm="",
    qkv=tuple(f"attn.{name}_proj" for name in "qkv"),
    o="attn.out_proj",
    up=("mlp.fc_in",),
    down="mlp.fc_out",
)
# The activation is applied to the second projection.
JAIS = replace(GPT2, positions="", up=("mlp.c_fc2", "mlp.c_fc"))
QWEN = replace(
    _TRANSFORMER,
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    # The activation is applied to the second projection.
    up=("mlp.w2", "mlp.w1"),
    down="mlp.c_proj",
)
OPT = WeightNames(
    optional_prefix="model.",
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    final_norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{}.",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    o="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
)
BLOOM = replace(
    _TRANSFORMER,
    optional_prefix="transformer.",
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("self_attention.query_key_value",),
    o="self_attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)
MPT = WeightNames(
    embedding="transformer.wte",
    final_norm="transformer.norm_f",
    layer="transformer.blocks.{}.",
    attention_norm="norm_1",
    mlp_norm="norm_2",
    qkv=("attn.Wqkv",),
    o="attn.out_proj",
    up=("ffn.up_proj",),
    down="ffn.down_proj",
)
_LAYER_NORM: dict[str, Any] = {"norm": "layer", "norm_bias": True, "gated": False}
_BIASES: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}


def gpt2(config: Config) -> dict[str, Any]:
    """GPT-2: learned positions, linear weights stored as [in, out]."""
    refuse(
        config,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
        scale_attn_weights=True,
    )
    return {**_learned(config), **_LAYER_NORM, **_BIASES, "names": GPT2, "transposed": True}


def gpt_bigcode(config: Config) -> dict[str, Any]:
    """StarCoder 1: GPT-2 with one KV head, or with queries, keys and values fused by head."""
    refuse(config, add_cross_attention=False, scale_attn_weights=True)
    one = bool(config.get("multi_query", True))
    return {
        **_learned(config),
        **_LAYER_NORM,
        **_BIASES,
        "names": GPT2,
        "num_kv_heads": 1 if one else int(config["num_attention_heads"]),
        "qkv_layout": "stacked" if one else "grouped",
    }


def gpt_neo(config: Config) -> dict[str, Any]:
    """GPT-Neo: unscaled attention scores, a sliding window on layers of type "local"."""
    kinds = config.get("attention_layers")
    if kinds is None:
        types = config["attention_types"]
        kinds = [kind for names, count in types for _ in range(count) for kind in names]
    windows = {"global": 0, "local": int(config["window_size"])}
    return {
        **_learned(config),
        **_LAYER_NORM,
        "o_bias": True,
        "mlp_bias": True,
        "names": GPT_NEO,
        "attention_scale": 1.0,
        "sliding_windows": tuple(windows[kind] for kind in kinds),
    }


def gptj(config: Config) -> dict[str, Any]:
    """GPT-J: attention and MLP in parallel, interleaved rotation, biases in MLP and LM head."""
    head_dim = int(config["hidden_size"]) // int(config["num_attention_heads"])
    return {
        **_LAYER_NORM,
        "wiring": "parallel",
        "names": GPTJ,
        "num_kv_heads": int(config["num_attention_heads"]),
        "mlp_bias": True,
        "lm_head_bias": True,
        "rope": rope_spec(config, int(config.get("rotary_dim") or head_dim)),
        "rope_neox": False,
    }


def opt(config: Config) -> dict[str, Any]:
    """OPT: learned positions that begin at row 2, ReLU."""
    refuse(
        config,
        do_layer_norm_before=True,
        _remove_final_layer_norm=False,
        word_embed_proj_dim=config["hidden_size"],
    )
    bias = bool(config.get("enable_bias", True))
    weighted = bool(config.get("layer_norm_elementwise_affine", True))
    return {
        **_learned(config, offset=2),
        "norm": "layer",
        "norm_weight": weighted,
        "norm_bias": weighted,
        "gated": False,
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "names": OPT,
    }


def bloom(config: Config) -> dict[str, Any]:
    """BLOOM: ALiBi, a norm after the embedding."""
    refuse(config, apply_residual_connection_post_layernorm=False)
    return {
        **_LAYER_NORM,
        **_BIASES,
        "names": BLOOM,
        "num_kv_heads": int(config["num_attention_heads"]),
        "rope": None,
        "qkv_layout": "grouped",
        "alibi_slopes": alibi_slopes(int(config["num_attention_heads"])),
        "max_position_embeddings": int(config.get("seq_length") or 2048),
    }


def mpt(config: Config) -> dict[str, Any]:
    """MPT: ALiBi, no biases."""
    refuse(config, expansion_ratio=4, no_bias=True, logit_scale="none")
    attention = {name: v for name, v in (config.get("attn_config") or {}).items() if v is not None}
    refuse(attention, alibi=True, qk_ln=False, prefix_lm=False, attn_type="multihead_attention")
    heads = int(config["num_attention_heads"])
    return {
        "norm": "layer",
        "gated": False,
        "names": MPT,
        "num_kv_heads": int(config["num_attention_heads"]),
        "rope": None,
        "intermediate_size": 4 * int(config["hidden_size"]),
        "attention_scale": float(attention.get("softmax_scale") or 0.0),
        "clip_qkv": float(attention.get("clip_qkv") or 0.0),
        "alibi_slopes": _mpt_slopes(heads, float(attention.get("alibi_bias_max", 8))),
    }


def _mpt_slopes(heads: int, bias_max: float) -> tuple[float, ...]:
    """Return MPT's slopes. If `heads` isn't a power of two, they are taken from those of the next
    power of two, first those with odd indices.
    """
    num_slopes = 1 << (heads - 1).bit_length()
    slopes = alibi_slopes(num_slopes, bias_max)
    return slopes if num_slopes == heads else (slopes[1::2] + slopes[::2])[:heads]


def falcon_alibi(config: Config) -> dict[str, Any]:
    """Falcon-RW's ALiBi: slopes are rounded to bfloat16 and scaled like the attention scores."""
    heads = int(config["num_attention_heads"])
    scale = (int(config["hidden_size"]) // heads) ** -0.5
    rounded = torch.tensor(alibi_slopes(heads)).bfloat16().tolist()
    return {"rope": None, "alibi_slopes": tuple(slope * scale for slope in rounded)}


def _learned(config: Config, offset: int = 0) -> dict[str, Any]:
    """Return the fields for learned positions, of which position 0 is row `offset`."""
    positions = int(config["max_position_embeddings"])
    return {
        "rope": None,
        "num_positions": positions + offset,
        "position_offset": offset,
        "num_kv_heads": int(config["num_attention_heads"]),
    }


_EPS = {"rms_norm_eps": 1e-5}
_GPT = {**_EPS, "hidden_act": "gelu_new", "tie_word_embeddings": True}

FAMILIES = {
    "GPT2LMHeadModel": Family(gpt2, {**_GPT, "max_position_embeddings": 1024}),
    "GPTBigCodeForCausalLM": Family(
        gpt_bigcode,
        {**_GPT, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 1024},
    ),
    "GPTNeoForCausalLM": Family(gpt_neo, {**_GPT, "window_size": 256}),
    "GPTJForCausalLM": Family(
        gptj, {**_EPS, "hidden_act": "gelu_new", "max_position_embeddings": 2048}
    ),
    "OPTForCausalLM": Family(opt, {**_EPS, "hidden_act": "relu", "tie_word_embeddings": True}),
    "BloomForCausalLM": Family(
        bloom,
        {
            **_EPS,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
            "max_position_embeddings": 2048,
        },
    ),
    "MptForCausalLM": Family(
        mpt,
        {
            **_EPS,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "max_position_embeddings": 2048,
        },
    ),
}
