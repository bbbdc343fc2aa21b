"""Families whose code comes with their checkpoints, as `transformers` has no class for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.contract.errors import BadModelConfig, ModelLoadError
from engine.models.decoder_spec import MoeSpec, WeightNames
from engine.models.families.common import Config, Family, alibi_slopes, refuse, window_everywhere
from engine.models.families.gpt import JAIS, QWEN
from engine.models.families.llama import llama
from engine.models.rotary_embedding import rope_spec
from kernels.attention import BlockSparse

NAMES = WeightNames(
    final_norm="model.final_layernorm",
    qkv=("self_attn.query_key_value",),
    o="self_attn.dense",
    up=("mlp.up_proj",),
)
#: The size of Phi-3-small's published vocabulary, its used ids from 100256 on, and the unused ones.
_VOCAB = 100352
_MEANT = (100257, 100261, 100262, 100263, 100266)
_UNUSED = [token for token in range(100256, _VOCAB) if token not in _MEANT]


def phi3small(config: Config) -> dict[str, Any]:
    """Phi-3-small: block-sparse attention, fused queries, keys and values, and gpt-oss's clamped
    activation with interleaved rows.
    """
    heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
    size = int(config["hidden_size"]) // heads
    by_size = bool(config["mup_use_scaling"])
    dense_every = int(config["dense_attention_every_n_layers"] or 0)
    return {
        "names": NAMES,
        "norm": "layer",
        "norm_bias": True,
        "qkv_layout": "grouped",
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "activation": "swiglu_clamped",
        "activation_limit": _size(config, "gegelu_limit", float),
        "interleaved": True,
        "attention_scale": float(config["mup_attn_multiplier"]) / size if by_size else 0.0,
        "embedding_scale": max(0.0, float(config["mup_embedding_multiplier"])) or 1.0,
        "logit_scale": 1.0 / (float(config["mup_width_multiplier"]) or 1.0),
        "suppressed_tokens": _hidden_tokens(config),
        "sparse": BlockSparse(
            block=_size(config, "blocksparse_block_size"),
            local=_size(config, "blocksparse_num_local_blocks"),
            stride=_size(config, "blocksparse_vert_stride"),
            head_step=0
            if config["blocksparse_homo_head_pattern"]
            else max(1, int(config["blocksparse_vert_stride"]) // heads),
        ),
        "sparse_layers": tuple(
            not dense_every or (layer + 1) % dense_every != 0 for layer in range(layers)
        ),
    }


def _size(config: Config, name: str, kind: type[int] | type[float] = int) -> Any:
    """Return a number above 0. Raises `BadModelConfig` for others."""
    value = kind(config[name])
    if not 0 < value < 1 << 31:
        raise BadModelConfig(f"config.json: {name} must be above 0, got {value!r}.", param=name)
    return value


def _hidden_tokens(config: Config) -> tuple[int, ...]:
    """Return `dummy_token_indices`, by default the unused tokens of the published vocabulary.

    Raises `BadModelConfig` for ids outside of the vocabulary.
    """
    vocab = int(config["vocab_size"])
    token_ids = config.get("dummy_token_indices", _UNUSED if vocab == _VOCAB else [])
    if not all(isinstance(token, int) and 0 <= token < vocab for token in token_ids):
        raise BadModelConfig(
            f"config.json: dummy_token_indices must name tokens below {vocab}.",
            param="dummy_token_indices",
        )
    return tuple(token_ids)


def _usual_names(config: Config) -> Config:
    """Rename Phi-3-small's fields for sizes and rotary embedding."""
    hidden = int(config["hidden_size"])
    inner = config.get("ff_intermediate_size")
    if inner is None and config.get("ff_dim_multiplier") is not None:
        inner = int(config["ff_dim_multiplier"]) * (hidden // 3) * 2
        inner = -(-inner // 256) * 256 if config.get("gegelu_pad_to_256", True) else inner
    stretch = float(config.get("rope_position_scale") or 1.0)
    linear = {"rope_type": "linear", "factor": stretch} if stretch != 1.0 else None
    return {
        **config,
        "intermediate_size": 14336 if inner is None else inner,
        "rope_theta": config.get("rope_embedding_base") or 1000000.0,
        "rope_scaling": config.get("rope_scaling") or linear,
    }


def _without_activation(config: Config) -> Config:
    """Drop `hidden_act`, as the common activations don't include gegelu, the only one supported."""
    prepared = _usual_names(config)
    refuse(prepared, hidden_act="gegelu")
    return {**prepared, "hidden_act": None}


DEFAULTS: Config = {
    "vocab_size": _VOCAB,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "gegelu_limit": 20.0,
    "blocksparse_homo_head_pattern": False,
    "blocksparse_block_size": 64,
    "blocksparse_num_local_blocks": 16,
    "blocksparse_vert_stride": 8,
    "dense_attention_every_n_layers": 2,
    "mup_use_scaling": True,
    "mup_width_multiplier": 8.0,
    "mup_embedding_multiplier": 10.0,
    "mup_attn_multiplier": 1.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
FAMILIES = {"Phi3SmallForCausalLM": Family(phi3small, DEFAULTS, _without_activation)}


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
ARCTIC = WeightNames(
    up=("block_sparse_moe.mlp.w1", "block_sparse_moe.mlp.w3"),
    down="block_sparse_moe.mlp.w2",
)
#: The vocabulary size of Baichuan 2; version 1 has another.
_BAICHUAN2_VOCAB = 125696


def internlm(config: Config) -> dict[str, Any]:
    """InternLM: Llama with biases in attention, by default."""
    bias = bool(config.get("bias", True))
    return {"qkv_bias": bias, "o_bias": bias}


def internlm2(config: Config) -> dict[str, Any]:
    """InternLM 2: queries, keys and values fused by KV head."""
    bias = bool(config.get("bias", False))
    return {"names": INTERNLM2, "qkv_layout": "grouped", "qkv_bias": bias, "o_bias": bias}


def baichuan(config: Config) -> dict[str, Any]:
    """Baichuan: Llama with fused projections; 13B has ALiBi, version 2 a normalized output
    layer.
    """
    heads = int(config["num_attention_heads"])
    alibi = {"rope": None, "alibi_slopes": alibi_slopes(heads)} if config["alibi"] else {}
    return {
        "names": WeightNames(qkv=("self_attn.W_pack",)),
        "num_kv_heads": heads,
        # Nothing else in config.json distinguishes version 2.
        "normalized_head": "z_loss_weight" in config or config["vocab_size"] == _BAICHUAN2_VOCAB,
        **alibi,
    }


def _baichuan_positions(config: Config) -> Config:
    """Detect ALiBi, which 13B has, by the missing `max_position_embeddings`, and set that."""
    alibi = "max_position_embeddings" not in config
    length = config.get("max_position_embeddings") or config.get("model_max_length")
    return {**config, "alibi": alibi, "max_position_embeddings": length}


def minicpm(config: Config) -> dict[str, Any]:
    """MiniCPM: Llama with scaled embedding, residual and logits."""
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
    """Qwen 1: biases of queries, keys and values; `intermediate_size` counts both MLP halves.

    The context is limited to the length from which dynamic NTK scaling and scaled logits would be
    needed.
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
    """ChatGLM 2 and 3: interleaved rotation of half of each head, few KV heads."""
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


def yi(config: Config) -> dict[str, Any]:
    """Yi before it was published as Llama: Llama with other names of norms."""
    return {**llama(config), "names": WeightNames(attention_norm="ln1", mlp_norm="ln2")}


def jais(config: Config) -> dict[str, Any]:
    """Jais: GPT-2 with ALiBi, a gated MLP and the multipliers of muP (arXiv 2203.03466)."""
    refuse(
        config,
        position_embedding_type="alibi",
        scale_attn_by_inverse_layer_idx=False,
        alibi_scaling=None,
    )
    heads = int(config["num_attention_heads"])
    size = int(config["hidden_size"]) // heads
    by_size = config.get("scale_qk_dot_by_d", config.get("mup_scale_qk_dot_by_d", False))
    alpha, width = config.get("mup_output_alpha", 1.0), config.get("mup_width_scale", 1.0)
    gated = bool(config["gated"])
    return {
        "names": JAIS if gated else replace(JAIS, up=("mlp.c_fc",)),
        "transposed": True,
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "gated": gated,
        "rope": None,
        "num_kv_heads": heads,
        "alibi_slopes": alibi_slopes(heads),
        "attention_scale": 1.0 / size if by_size else 0.0,
        "embedding_scale": float(
            config.get("embeddings_scale") or config.get("mup_embeddings_scale") or 1.0
        ),
        "logit_scale": float(config.get("width_scale") or alpha * width),
    }


def _jais_activation(config: Config) -> Config:
    """Convert Jais's activation "swiglu" to a gated MLP with SiLU."""
    gated = config.get("activation_function") == "swiglu"
    return {**config, "gated": gated, **({"activation_function": "silu"} if gated else {})}


def decilm(config: Config) -> dict[str, Any]:
    """DeciLM: Llama with a number of KV heads per layer."""
    refuse(config, block_configs=None, attention_bias=False)
    per_layer = [int(heads) for heads in config["num_key_value_heads_per_layer"]]
    max_heads = max(per_layer, default=0)
    if len(per_layer) != int(config["num_hidden_layers"]) or any(
        heads < 1 or max_heads % heads for heads in per_layer
    ):
        raise ModelLoadError(
            "config.json: num_key_value_heads_per_layer must name a divisor of the largest for "
            f"each of {config['num_hidden_layers']} layers; it is {per_layer}.",
            param="num_key_value_heads_per_layer",
        )
    return {**llama(config), "num_kv_heads": max_heads, "layer_kv_heads": tuple(per_layer)}


def arctic(config: Config) -> dict[str, Any]:
    """Arctic: every `moe_layer_frequency`-th layer has an MLP after attention, and experts in
    parallel to both.
    """
    refuse(config, attention_bias=False)
    step = int(config.get("moe_layer_frequency", 2))
    has_residual_mlp = bool(config.get("use_residual", True)) and bool(
        config.get("parallel_attn_mlp_res", True)
    )
    top_k = int(config["num_experts_per_tok"])
    moe = MoeSpec(
        num_experts=int(config["num_experts"]),
        top_k=top_k,
        intermediate_size=int(config["intermediate_size"]),
        layers=tuple((layer + 1) % step == 0 for layer in range(int(config["num_hidden_layers"]))),
        renormalize=top_k > 1,
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts.",
        expert_names=("w1", "w3", "w2"),
    )
    return {
        "moe": moe,
        "names": ARCTIC,
        # The MLP parallel to the experts has the hidden size as its intermediate size.
        "residual_size": int(config["hidden_size"]) if has_residual_mlp else 0,
        "sliding_windows": window_everywhere(config),
    }


REMOTE_CODE_FAMILIES = {
    "AquilaForCausalLM": Family(llama),
    "XverseForCausalLM": Family(llama),
    "InternLMForCausalLM": Family(internlm),
    "InternLM2ForCausalLM": Family(internlm2),
    "BaiChuanForCausalLM": Family(baichuan, prepare=_baichuan_positions),
    "BaichuanForCausalLM": Family(baichuan, prepare=_baichuan_positions),
    "MiniCPMForCausalLM": Family(minicpm, {"tie_word_embeddings": True}),
    "OrionForCausalLM": Family(orion, {"rms_norm_eps": 1e-5}),
    "QWenLMHeadModel": Family(qwen),
    "ChatGLMModel": Family(chatglm),
    "JAISLMHeadModel": Family(
        jais, {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}, _jais_activation
    ),
    "DeciLMForCausalLM": Family(decilm),
    "YiForCausalLM": Family(yi),
    "ArcticForCausalLM": Family(arctic, {"rms_norm_eps": 1e-5}),
}
