"""RecurrentGemma: attention and linear recurrent units."""

from __future__ import annotations

from typing import Any

import torch

from engine.contract.errors import BadModelConfig, ModelLoadError
from engine.models.decoder_spec import MambaSpec, WeightNames
from engine.models.families.common import (
    Config,
    Family,
    refuse,
    size_field,
)

#: The names of RecurrentGemma.
_GRIFFIN = WeightNames(
    final_norm="model.final_norm",
    attention_norm="temporal_pre_norm",
    mlp_norm="channel_pre_norm",
    qkv=("temporal_block.q_proj", "temporal_block.k_proj", "temporal_block.v_proj"),
    o="temporal_block.o_proj",
    up=("mlp_block.gate_proj", "mlp_block.up_proj"),
    down="mlp_block.down_proj",
)


def recurrent_gemma(config: Config) -> dict[str, Any]:
    """RecurrentGemma (Griffin): most layers are real-gated linear recurrent units (RG-LRU), the
    others have attention with a sliding window.
    """
    refuse(config, hidden_act="gelu_pytorch_tanh")
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    types, heads = config["block_types"], int(config["num_attention_heads"])
    if not types or (unknown := set(types) - {"recurrent", "attention"}):
        kind = sorted(unknown)[0] if types else types
        raise ModelLoadError(
            f"config.json: block_types: {kind!r} isn't supported.", param="block_types"
        )
    carried = tuple(types[layer % len(types)] == "recurrent" for layer in range(layers))
    width = size_field({"lru_width": hidden, **config}, "lru_width")
    if width % heads:
        raise BadModelConfig(
            f"config.json: num_attention_heads ({heads}) must divide lru_width ({width}).",
            param="lru_width",
        )
    states = MambaSpec(
        kind="rg_lru",
        layers=carried,
        num_heads=heads,
        num_key_heads=1,
        value_size=width // heads,
        key_size=1,
        conv_width=size_field(config, "conv1d_width"),
        conv_bias=True,
        bias=True,
        inputs="temporal_block.linear_x",
        output_gate="temporal_block.linear_y",
        input_gate="temporal_block.rg_lru.input_gate",
        recurrence_gate="temporal_block.rg_lru.recurrent_gate",
        conv=("temporal_block.conv_1d",),
        decay="temporal_block.rg_lru.recurrent_param",
        rate_bias="",
        skip="",
        gated_norm="",
        output="temporal_block.linear_out",
    )
    return {
        "names": _GRIFFIN,
        "norm_offset": 1.0,
        # The model was trained with the root rounded to bfloat16.
        "embedding_scale": torch.tensor(hidden**0.5, dtype=torch.bfloat16).item(),
        "logit_soft_cap": float(config["logits_soft_cap"]),
        "activation": "gelu_tanh",
        "intermediate_size": size_field(config, "intermediate_size") // 2,
        "mlp_bias": True,
        "qkv_bias": bool(config["attention_bias"]),
        "o_bias": True,
        "sliding_windows": (size_field(config, "attention_window_size"),) * layers,
        "states": states if any(carried) else None,
    }


FAMILIES = {
    "RecurrentGemmaForCausalLM": Family(
        recurrent_gemma,
        {
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.5,
            "block_types": ["recurrent", "recurrent", "attention"],
            "attention_window_size": 2048,
            "attention_bias": False,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
        },
    ),
}
