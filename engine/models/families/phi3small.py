"""Phi-3 small: block-sparse attention in every other layer, GEGELU, the multipliers of muP."""

from __future__ import annotations

from typing import Any

from engine.contract.errors import BadModelConfig
from engine.models.families.family import Config, Family, refuse
from engine.models.names import WeightNames
from kernels.attention import BlockSparse

NAMES = WeightNames(
    final_norm="model.final_layernorm",
    qkv=("self_attn.query_key_value",),
    o="self_attn.dense",
    up=("mlp.up_proj",),
)
#: Of the published vocabulary: tokens that its tokenizer never means.
_VOCAB = 100352
_MEANT = (100257, 100261, 100262, 100263, 100266)
_UNUSED = [token for token in range(100256, _VOCAB) if token not in _MEANT]


def phi3small(config: Config) -> dict[str, Any]:
    """The spec's fields; the MLP is gpt-oss's, its rows in turns."""
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
        "hidden_tokens": _hidden_tokens(config),
        "sparse": BlockSparse(
            block=_size(config, "blocksparse_block_size"),
            local=_size(config, "blocksparse_num_local_blocks"),
            stride=_size(config, "blocksparse_vert_stride"),
            head_step=_head_step(config, heads),
        ),
        "sparse_layers": tuple(
            not dense_every or (layer + 1) % dense_every != 0 for layer in range(layers)
        ),
    }


def _head_step(config: Config, heads: int) -> int:
    if config["blocksparse_homo_head_pattern"]:
        return 0
    return max(1, int(config["blocksparse_vert_stride"]) // heads)


def _size(config: Config, name: str, kind: type[int] | type[float] = int) -> Any:
    """A number above 0."""
    value = kind(config[name])
    if not 0 < value < 1 << 31:
        raise BadModelConfig(f"config.json: {name} must be above 0, got {value!r}.", param=name)
    return value


def _hidden_tokens(config: Config) -> tuple[int, ...]:
    """What `dummy_token_indices` names, or the published vocabulary's own."""
    vocab = int(config["vocab_size"])
    found = config.get("dummy_token_indices", _UNUSED if vocab == _VOCAB else [])
    if not all(isinstance(token, int) and 0 <= token < vocab for token in found):
        raise BadModelConfig(
            f"config.json: dummy_token_indices must name tokens below {vocab}.",
            param="dummy_token_indices",
        )
    return tuple(found)


def _usual_names(config: Config) -> Config:
    """Its own names of sizes and of the rotary embedding."""
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
    """GEGELU is no activation that families share."""
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
