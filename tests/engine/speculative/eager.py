"""A model for which a head of one layer says what it says itself, at a fraction of its time."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.engine.models import VOCAB, make_model
from tests.engine.speculative.head_folders import write

_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS = 256, 1024, 32, 4, 2
_FIRST = "model.layers.0."


def eager_model(folder: Path) -> tuple[Path, Path]:
    """The model's folder and its EAGLE head's.

    All layers but the first add nothing. What that one takes needs no norm, for each embedding has
    length 1 in its norm's sense; so the head's layer, which has none, can be that layer. Its one
    difference is that it never sees a sequence's first token.
    """
    model = make_model(
        "llama", folder / "model", hidden_size=_HIDDEN, intermediate_size=_INNER,
        num_hidden_layers=_LAYERS, initializer_range=0.1,
    )  # fmt: skip
    weights = load_file(model / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) and not name.startswith(_FIRST):
            tensor.zero_()
        elif name in (f"{_FIRST}input_layernorm.weight", "model.norm.weight"):
            tensor.fill_(1.0)
    embedding = weights["model.embed_tokens.weight"]
    embedding /= embedding.pow(2).mean(-1, keepdim=True).sqrt()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    head = {
        f"layers.0.{name.removeprefix(_FIRST)}": tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(_FIRST) and "input_layernorm" not in name
    }
    head["fc.weight"] = torch.eye(_HIDDEN, 2 * _HIDDEN)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": _HIDDEN,
        "intermediate_size": _INNER, "num_attention_heads": _HEADS, "rms_norm_eps": 1e-6,
        "num_key_value_heads": _KV_HEADS, "num_hidden_layers": 1, "vocab_size": VOCAB,
        "max_position_embeddings": 512, "hidden_act": "silu",
    }  # fmt: skip
    return model, write(folder / "EAGLE-head", config, head)
