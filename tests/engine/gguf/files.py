"""GGUF files of tiny models, written by llama.cpp's own package in the way of its converter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from engine.checkpoints.gguf.names import expert_of, gguf_name
from tests.engine.gguf.quantizer import K_WRITERS, fitting, k_quantized

KindOf = Callable[[str], Kind]


def everywhere(kind: Kind) -> KindOf:
    """Matrices as `kind`, vectors as F32."""
    return lambda name: kind


def write_gguf(
    folder: Path, path: Path, kind_of: KindOf, architecture: str = "llama", tensors_a_file: int = 0
) -> Path:
    """A checkpoint's folder as a GGUF file; vectors are always F32.

    With `tensors_a_file` in parts of so many tensors; `path` is then what they are named after.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_a_file)
    _add_shape(writer, config)
    _add_tokenizer(writer, folder)
    for name, tensor in _with_experts_together(load_file(folder / "model.safetensors")).items():
        stored = gguf_name(name, architecture)
        value = _as_stored(name, tensor.float(), config, architecture).numpy()
        if "shared_expert_gate" in name:
            value = value[0]
        if value.ndim == 1:
            writer.add_tensor(stored, value)
            continue
        kind = fitting(kind_of(stored), value.shape[-1])
        writer.add_tensor(stored, quantized(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _with_experts_together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each layer's experts as one tensor [experts, rows, columns], as the converter keeps them."""
    actual_tensors: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        together, expert = expert_of(name)
        if expert is None:
            actual_tensors[name] = tensor
        else:
            experts.setdefault(together, {})[expert] = tensor
    stacked = {
        name: torch.stack([parts[index] for index in sorted(parts)])
        for name, parts in experts.items()
    }
    return actual_tensors | stacked


def quantized(value: np.ndarray, kind: Kind) -> np.ndarray:
    """Rows as `kind`; K-quants that neither the package nor we can write get random blocks."""
    if kind == Kind.F32:
        return value
    if kind == Kind.F16:
        return value.astype(np.float16)
    if kind in K_WRITERS:
        return k_quantized(value, kind)
    try:
        return gguf.quants.quantize(value, kind)
    except NotImplementedError:
        return random_blocks(kind, value.shape[0], value.shape[1])


def random_blocks(kind: Kind, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """uint8 [rows, bytes of a row]: random integers with small scales."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    positions = {
        Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.Q8_0: (0,), Kind.Q4_0: (0,),
        Kind.Q4_1: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2), Kind.Q2_K: (80, 82),
        Kind.Q3_K: (108,), Kind.IQ4_NL: (0,), Kind.IQ4_XS: (0,), Kind.MXFP4: (),
    }[kind]  # fmt: skip
    for position in positions:
        scales = (rng.random((rows, columns // values, 1)) * 1e-3).astype(np.float16)
        raw[..., position : position + 2] = scales.view(np.uint8)
    if kind == Kind.MXFP4:
        raw[..., 0] = raw[..., 0] % 8 + 114  # powers of two that float16 has
    if kind == Kind.Q8_0:
        raw[..., 2:][raw[..., 2:] == 128] = 0  # -128, which its quantizer doesn't write
    return raw.reshape(rows, -1)


def _as_stored(
    name: str, tensor: torch.Tensor, config: dict[str, Any], architecture: str
) -> torch.Tensor:
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1.0
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }.get(name.split(".")[-2] if "." in name else "")
    if architecture != "llama" or heads is None:
        return tensor
    shape = tensor.shape
    return tensor.view(heads, 2, shape[0] // heads // 2, *shape[1:]).transpose(1, 2).reshape(shape)


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config["model_type"] == "phi3":
        writer.add_sliding_window(config["sliding_window"])
    if config.get("final_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_sliding_window(config["sliding_window"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = dict(tokenizer["model"]["vocab"])
    special = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    vocab |= special
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer.add_tokenizer_model("gpt2")
    cut = json.dumps(tokenizer["pre_tokenizer"])
    writer.add_tokenizer_pre("qwen2" if "Split" in cut else "gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(vocab[settings["eos_token"]])
    if "<|endoftext|>" in vocab:
        writer.add_eot_token_id(vocab["<|endoftext|>"])
    if settings.get("bos_token"):
        writer.add_bos_token_id(vocab[settings["bos_token"]])
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())
    elif settings.get("chat_template"):
        writer.add_chat_template(settings["chat_template"])
