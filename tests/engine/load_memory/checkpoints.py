"""Checkpoints of 100 million parameters, all zero: files that are holes but for their headers."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import gguf
from gguf import GGMLQuantizationType as Kind

from engine.models.gguf.names import gguf_name

HIDDEN, INNER, LAYERS, VOCAB, HEADS, KV_HEADS = 1024, 2816, 8, 8192, 16, 4
Shapes = dict[str, tuple[int, ...]]
_NAMES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}


def shapes(tied: bool = False) -> Shapes:
    """Of a Llama's tensors."""
    found: Shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    if not tied:
        found["lm_head"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        at, kv = f"model.layers.{layer}.", HIDDEN * KV_HEADS // HEADS
        for name, rows in (("q", HIDDEN), ("k", kv), ("v", kv), ("o", HIDDEN)):
            found[f"{at}self_attn.{name}_proj"] = (rows, HIDDEN)
        found |= {f"{at}mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
        found[f"{at}mlp.down_proj"] = (HIDDEN, INNER)
        found |= {f"{at}{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
    return {f"{name}.weight": shape for name, shape in found.items()}


def write_checkpoint(folder: Path, dtype: str, shards: int = 1, tied: bool = False) -> Path:
    """A Llama's folder with safetensors."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied,
        "dtype": dtype,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder, shapes(tied), dtype, shards)
    return folder


def write_tensors(folder: Path, tensors: Shapes, dtype: str, shards: int = 1) -> None:
    """model.safetensors, or `shards` files and their index."""
    if shards == 1:
        _write_holes(folder / "model.safetensors", tensors, dtype)
        return
    index: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        _write_holes(folder / name, part, dtype)
        index |= dict.fromkeys(part, name)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _write_holes(path: Path, tensors: Shapes, dtype: str) -> None:
    kind, itemsize = _NAMES[dtype]
    _write_kinds(path, {name: (kind, shape, itemsize) for name, shape in tensors.items()})


def _write_kinds(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], int]]) -> None:
    """Tensors of a dtype, a shape, and bytes of an element."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (kind, shape, itemsize) in tensors.items():
        begin, end = end, end + math.prod(shape) * itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_quantized(folder: Path, method: str) -> Path:
    """The same, its linear layers as "awq" or "fp8" keeps them."""
    write_checkpoint(folder, "bfloat16")
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for name, shape in shapes().items():
        at = name.removesuffix(".weight")
        if "_proj" not in name:
            tensors[name] = ("BF16", shape, 2)
        elif method == "awq":
            rows, columns = shape
            tensors[f"{at}.qweight"] = ("I32", (columns, rows // 8), 4)
            tensors[f"{at}.qzeros"] = ("I32", (columns // 128, rows // 8), 4)
            tensors[f"{at}.scales"] = ("F16", (columns // 128, rows), 2)
        else:
            tensors[name] = ("F8_E4M3", shape, 1)
            tensors[f"{at}.weight_scale"] = ("F32", (shape[0], 1), 4)
    _write_kinds(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_gguf_file(path: Path, kind: Kind, mixed: Kind | None = None) -> Path:
    """The same as a GGUF file; `mixed` is what values and the MLP's way down have instead."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    size = 0
    for name, shape in shapes().items():
        of = mixed if mixed and ("v_proj" in name or "down_proj" in name) else kind
        of = Kind.F32 if len(shape) == 1 else of
        values, nbytes = gguf.GGML_QUANT_SIZES[of]
        taken = math.prod(shape) // values * nbytes
        stored = (*shape[:-1], shape[-1] // values * nbytes)
        writer.add_tensor_info(
            gguf_name(name, "llama"), stored, gguf.np.dtype("uint8"), taken, raw_dtype=of
        )
        size += taken + -taken % writer.data_alignment
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        end = file.tell()
        file.truncate(end + -end % writer.data_alignment + size)
    return path
