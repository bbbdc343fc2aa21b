"""Families whose code comes with their checkpoints: `transformers` has no class of that name."""

from __future__ import annotations

from typing import Any

from engine.errors import ModelLoadError
from engine.layers.rotary import rope_spec
from engine.models.families.family import Config, Family, refuse
from engine.models.families.llama import llama
from engine.models.names import WeightNames

INTERNLM2 = WeightNames(
    embedding="model.tok_embeddings",
    lm_head="output",
    attention_norm="attention_norm",
    mlp_norm="ffn_norm",
    qkv=("attention.wqkv",),
    o="attention.wo",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)
QWEN = WeightNames(
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}.",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    # The second one is activated.
    up=("mlp.w2", "mlp.w1"),
    down="mlp.c_proj",
)
CHATGLM = WeightNames(
    embedding="transformer.embedding.word_embeddings",
    final_norm="transformer.encoder.final_layernorm",
    lm_head="transformer.output_layer",
    layer="transformer.encoder.layers.{}.",
    qkv=("self_attention.query_key_value",),
    o="self_attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)
#: Baichuan 2's vocabulary: its head is normed, which nothing else in its config tells.
_BAICHUAN2_VOCAB = 125696


def internlm(config: Config) -> dict[str, Any]:
    """InternLM: Llama with biases in attention."""
    bias = bool(config.get("bias", True))
    return {"qkv_bias": bias, "o_bias": bias}


def internlm2(config: Config) -> dict[str, Any]:
    """InternLM 2: queries, keys and values fused by KV head."""
    bias = bool(config.get("bias", False))
    return {"names": INTERNLM2, "qkv_layout": "grouped", "qkv_bias": bias, "o_bias": bias}


def baichuan(config: Config) -> dict[str, Any]:
    """Baichuan 7B: Llama with one fused projection. 13B (ALiBi) and version 2 are refused."""
    if int(config["vocab_size"]) == _BAICHUAN2_VOCAB:
        raise ModelLoadError(
            "config.json: vocab_size: Baichuan 2's normed head isn't supported.",
            param="vocab_size",
        )
    if "model_max_length" in config and "max_position_embeddings" not in config:
        raise ModelLoadError(
            "config.json: model_max_length: Baichuan 13B's ALiBi isn't supported.",
            param="model_max_length",
        )
    return {"names": WeightNames(qkv=("self_attn.W_pack",))}


def minicpm(config: Config) -> dict[str, Any]:
    """MiniCPM: Llama with scaled embedding, depth and head."""
    refuse(config, num_experts=0)
    root, hidden = int(config["num_hidden_layers"]) ** 0.5, float(config["hidden_size"])
    return {
        **llama(config),
        "embedding_scale": float(config.get("scale_emb", 1.0)),
        "residual_scale": float(config.get("scale_depth", root)) / root,
        "logit_scale": float(config.get("dim_model_base", hidden)) / hidden,
    }


def orion(config: Config) -> dict[str, Any]:
    """Orion: Llama with LayerNorm."""
    return {**llama(config), "norm": "layer", "norm_bias": True}


def qwen(config: Config) -> dict[str, Any]:
    """Qwen 1: biases of queries, keys and values; the MLP's config size counts both halves.

    The context ends where dynamic NTK scaling and scaled logits would begin.
    """
    refuse(config, no_bias=True)
    return {
        "names": QWEN,
        "qkv_bias": True,
        "intermediate_size": int(config["intermediate_size"]) // 2,
        "max_position_embeddings": int(
            config.get("seq_length") or config["max_position_embeddings"]
        ),
    }


def chatglm(config: Config) -> dict[str, Any]:
    """ChatGLM 2 and 3: neighbours are rotated in half of each head, few KV heads."""
    refuse(
        config,
        rmsnorm=True,
        post_layer_norm=True,
        apply_residual_connection_post_layernorm=False,
    )
    heads, size = int(config["num_attention_heads"]), int(config["head_dim"])
    few = bool(config.get("multi_query_attention", False))
    bias = bool(config.get("add_bias_linear", False))
    theta = 10000.0 * float(config.get("rope_ratio", 1.0))
    return {
        "names": CHATGLM,
        "num_kv_heads": int(config["multi_query_group_num"]) if few else heads,
        "qkv_bias": bias or bool(config.get("add_qkv_bias", False)),
        "o_bias": bias,
        "mlp_bias": bias,
        "rope": rope_spec({**config, "rope_theta": theta}, size // 2),
        "rope_neox": False,
    }


FAMILIES = {
    "AquilaForCausalLM": Family(llama),
    "XverseForCausalLM": Family(llama),
    "InternLMForCausalLM": Family(internlm),
    "InternLM2ForCausalLM": Family(internlm2),
    "BaiChuanForCausalLM": Family(baichuan),
    "BaichuanForCausalLM": Family(baichuan),
    "MiniCPMForCausalLM": Family(minicpm, {"tie_word_embeddings": True}),
    "OrionForCausalLM": Family(orion, {"rms_norm_eps": 1e-5}),
    "QWenLMHeadModel": Family(qwen),
    "ChatGLMModel": Family(chatglm),
}
