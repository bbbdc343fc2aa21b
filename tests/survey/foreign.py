"""Architectures without a class in `transformers`, proven by one that computes the same; and
checkpoints of known architectures whose tensors have other names.

The model is made by the class that has the same arithmetic; its tensors and its config.json are
then rewritten the way the architecture's published checkpoints have them. The oracle runs the
model as it was made.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.survey.recipes import MAX_POSITIONS, RECIPES, VOCAB, recipe

Tensors = dict[str, Tensor]
_HEADS, _KV_HEADS, _DIM = 4, 2, 16


@dataclass(frozen=True, slots=True)
class Foreign:
    """One architecture.

    Attributes:
        base: recipe of the class that computes the same.
        architecture: as config.json names it.
        config: its config.json; without one, the base's is kept.
        renamed: parts of tensor names and what they become, in order.
        reshape: what fuses tensors before they're renamed.
    """

    base: dict[str, Any]
    architecture: str
    config: dict[str, Any] | None = None
    renamed: dict[str, str] = field(default_factory=dict)
    reshape: Callable[[Tensors], Tensors] = lambda tensors: tensors


def rewrite(source: Path, folder: Path, foreign: Foreign) -> None:
    """Write the checkpoint in `source` to `folder` as the foreign architecture has it."""
    # generation_config.json and the tokenizer stay as they are.
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = foreign.reshape(load_file(source / "model.safetensors"))
    renamed = {_rename(name, foreign.renamed): tensor for name, tensor in tensors.items()}
    save_file({name: t.clone() for name, t in renamed.items()}, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if foreign.config is not None:
        config = {"vocab_size": VOCAB, "eos_token_id": 2, "bos_token_id": 0, **foreign.config}
    config |= {"architectures": [foreign.architecture]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _rename(name: str, parts: dict[str, str]) -> str:
    for old, new in parts.items():
        name = name.replace(old, new)
    return name


def _stacked(target: str) -> Callable[[Tensors], Tensors]:
    """Queries, keys and values over each other, as `target`."""
    return _fused(target, lambda q, k, v: torch.cat((q, k, v)))


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By KV head: its queries, its key, its value."""
    parts = [part.view(_KV_HEADS, -1, _DIM, part.shape[-1]) for part in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 2)


def _fused(
    target: str, join: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Callable[[Tensors], Tensors]:
    def reshape(tensors: Tensors) -> Tensors:
        out = dict(tensors)
        for name in tensors:
            if ".q_proj." in name:
                q, k, v = (out.pop(name.replace(".q_", f".{part}_")) for part in "qkv")
                out[name.replace("q_proj", target)] = join(q, k, v)
        return out

    return reshape


def _experts_fused(tensors: Tensors) -> Tensors:
    """All of a layer's experts in two tensors: gate over up, and down."""
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in tensors:
        if name.endswith(".experts.0.gate_proj.weight"):
            prefix, gate_up, down, expert = name.removesuffix("0.gate_proj.weight"), [], [], 0
            while f"{prefix}{expert}.gate_proj.weight" in tensors:
                parts = [f"{prefix}{expert}.{part}_proj.weight" for part in ("gate", "up")]
                gate_up.append(torch.cat([tensors[part] for part in parts]))
                down.append(tensors[f"{prefix}{expert}.down_proj.weight"])
                expert += 1
            out[f"{prefix}gate_up_proj"], out[f"{prefix}down_proj"] = (
                torch.stack(gate_up),
                torch.stack(down),
            )
    return out


_SIZES = {"hidden_size": 64, "num_attention_heads": _HEADS}
FOREIGN: dict[str, Foreign] = {
    "aquila": Foreign(RECIPES["llama"], "AquilaForCausalLM"),
    "xverse": Foreign(RECIPES["llama"], "XverseForCausalLM"),
    "internlm": Foreign(
        recipe("llama", attention_bias=True, num_key_value_heads=_HEADS),
        "InternLMForCausalLM",
        {
            **_SIZES,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": 1e-6,
            "bias": True,
        },
    ),
    "internlm2": Foreign(
        RECIPES["llama"],
        "InternLM2ForCausalLM",
        renamed={
            "embed_tokens": "tok_embeddings",
            "lm_head": "output",
            "self_attn.o_proj": "attention.wo",
            "self_attn": "attention",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
        },
        reshape=_fused("wqkv", _grouped),
    ),
    "baichuan": Foreign(
        recipe("llama", num_key_value_heads=_HEADS),
        "BaiChuanForCausalLM",
        reshape=_stacked("W_pack"),
    ),
    "minicpm": Foreign(
        recipe(
            "granite",
            embedding_multiplier=3.0,
            residual_multiplier=0.5,
            attention_multiplier=_DIM**-0.5,
            logits_scaling=4.0,
            tie_word_embeddings=True,
        ),
        "MiniCPMForCausalLM",
        {
            **_SIZES,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_key_value_heads": _KV_HEADS,
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": 1e-6,
            "scale_emb": 3.0,
            "scale_depth": 0.5 * 2**0.5,
            "dim_model_base": 16,
        },
    ),
    "orion": Foreign(
        recipe(
            "stablelm",
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
        ),
        "OrionForCausalLM",
        {
            **_SIZES,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_key_value_heads": _KV_HEADS,
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": 1e-5,
        },
    ),
    "qwen": Foreign(
        recipe("qwen2", num_key_value_heads=_HEADS),
        "QWenLMHeadModel",
        {
            **_SIZES,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "seq_length": MAX_POSITIONS,
            "max_position_embeddings": MAX_POSITIONS,
            "layer_norm_epsilon": 1e-6,
            "rotary_emb_base": 10000,
            "rotary_pct": 1.0,
            "kv_channels": _DIM,
            "no_bias": True,
        },
        renamed={
            "model.embed_tokens": "transformer.wte",
            "model.norm": "transformer.ln_f",
            "model.layers": "transformer.h",
            "self_attn.o_proj": "attn.c_proj",
            "self_attn": "attn",
            "mlp.gate_proj": "mlp.w2",
            "mlp.up_proj": "mlp.w1",
            "mlp.down_proj": "mlp.c_proj",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
        },
        reshape=_stacked("c_attn"),
    ),
    # Names that other checkpoints of known architectures have.
    "gpt2-bare": Foreign(RECIPES["gpt2"], "GPT2LMHeadModel", renamed={"transformer.": ""}),
    "bloom-bare": Foreign(RECIPES["bloom"], "BloomForCausalLM", renamed={"transformer.": ""}),
    "opt-bare": Foreign(RECIPES["opt"], "OPTForCausalLM", renamed={"model.decoder": "decoder"}),
    "qwen3_moe-fused": Foreign(RECIPES["qwen3_moe"], "Qwen3MoeForCausalLM", reshape=_experts_fused),
    "chatglm": Foreign(
        recipe(
            "glm",
            head_dim=_DIM,
            rms_norm_eps=1e-5,
            attention_bias=True,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        ),
        "ChatGLMModel",
        {
            **_SIZES,
            "ffn_hidden_size": 96,
            "num_layers": 2,
            "padded_vocab_size": VOCAB,
            "kv_channels": _DIM,
            "multi_query_attention": True,
            "multi_query_group_num": _KV_HEADS,
            "seq_length": MAX_POSITIONS,
            "layernorm_epsilon": 1e-5,
            "add_qkv_bias": True,
            "add_bias_linear": False,
            "rmsnorm": True,
            "post_layer_norm": True,
            "apply_residual_connection_post_layernorm": False,
        },
        renamed={
            "model.embed_tokens": "transformer.embedding.word_embeddings",
            "model.norm": "transformer.encoder.final_layernorm",
            "model.layers": "transformer.encoder.layers",
            "lm_head": "transformer.output_layer",
            "self_attn.o_proj": "self_attention.dense",
            "self_attn": "self_attention",
            "mlp.gate_up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        reshape=_stacked("query_key_value"),
    ),
}
