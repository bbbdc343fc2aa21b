"""Checkpoints of 100 million parameters, all zero: files that are holes but for their headers."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
from gguf import GGMLQuantizationType as Kind

from engine.checkpoints.gguf.names import gguf_name

HIDDEN, INNER, LAYERS, VOCAB, HEADS, KV_HEADS = 1024, 2816, 8, 8192, 16, 4
Shapes = dict[str, tuple[int, ...]]
_NAMES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}


Layer = Callable[[int, int], "dict[str, Stored]"]
"""The tensors of a linear layer of so many rows and columns, by what follows its name."""


def shapes(tied: bool = False) -> Shapes:
    """Of a Llama's tensors."""
    shapes: Shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    if not tied:
        shapes["lm_head"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix, kv = f"model.layers.{layer}.", HIDDEN * KV_HEADS // HEADS
        for name, rows in (("q", HIDDEN), ("k", kv), ("v", kv), ("o", HIDDEN)):
            shapes[f"{prefix}self_attn.{name}_proj"] = (rows, HIDDEN)
        shapes |= {f"{prefix}mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj"] = (HIDDEN, INNER)
        shapes |= {f"{prefix}{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


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
    _write_kinds(path, {name: Stored(kind, shape, itemsize) for name, shape in tensors.items()})


class Stored(NamedTuple):
    """A tensor: its dtype, its shape, bytes of an element, and what is no hole."""

    kind: str
    shape: tuple[int, ...]
    itemsize: int
    content: bytes = b""


def _write_kinds(
    path: Path, tensors: Mapping[str, Stored], words: Mapping[str, str] | None = None
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(words or {})}}
    end, positions = 0, {}
    for name, tensor in tensors.items():
        begin, end = end, end + math.prod(tensor.shape) * tensor.itemsize
        header[name] = {
            "dtype": tensor.kind, "shape": list(tensor.shape), "data_offsets": [begin, end],
        }  # fmt: skip
        positions[begin] = tensor.content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for begin, content in positions.items():
            if content:
                file.seek(8 + len(text) + begin)
                file.write(content)
        file.truncate(8 + len(text) + end)


def _gptq(rows: int, columns: int) -> dict[str, Stored]:
    """Inputs sorted: each group has every eighth of them."""
    groups = columns // 128
    order = struct.pack(f"<{columns}i", *(column % groups for column in range(columns)))
    return {
        "qweight": Stored("I32", (columns // 8, rows), 4),
        "qzeros": Stored("I32", (groups, rows // 8), 4),
        "scales": Stored("F16", (groups, rows), 2),
        "g_idx": Stored("I32", (columns,), 4, order),
    }


def _awq(rows: int, columns: int) -> dict[str, Stored]:
    return {
        "qweight": Stored("I32", (columns, rows // 8), 4),
        "qzeros": Stored("I32", (columns // 128, rows // 8), 4),
        "scales": Stored("F16", (columns // 128, rows), 2),
    }


def _by_row(kind: str) -> Layer:
    def stored(rows: int, columns: int) -> dict[str, Stored]:
        return {
            "weight": Stored(kind, (rows, columns), 1),
            "weight_scale": Stored("F32", (rows, 1), 4),
        }

    return stored


def _nf4(rows: int, columns: int) -> dict[str, Stored]:
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": [rows, columns]}).encode()
    return {
        "weight": Stored("U8", (rows * columns // 2, 1), 1),
        "weight.absmax": Stored("F32", (rows * columns // 64,), 4),
        "weight.quant_map": Stored("F32", (16,), 4),
        "weight.quant_state.bitsandbytes__nf4": Stored("U8", (len(state),), 1, state),
    }


def _hqq(rows: int, columns: int) -> dict[str, Stored]:
    groups = rows * columns // 64
    return {
        "W_q": Stored("U8", (groups // 2, 64), 1),
        "scale": Stored("F16", (groups, 1), 2),
        "zero": Stored("F16", (groups, 1), 2),
        "shape": Stored("I64", (2,), 8, struct.pack("<2q", rows, columns)),
    }


def _mxfp4(rows: int, columns: int) -> dict[str, Stored]:
    """Scales of 1, powers of two by their exponents."""
    scales = rows * columns // 32
    return {
        "weight_packed": Stored("U8", (rows, columns // 2), 1),
        "weight_scale": Stored("U8", (rows, columns // 32), 1, b"\x7f" * scales),
    }


def _nvfp4(rows: int, columns: int) -> dict[str, Stored]:
    return {
        "weight": Stored("U8", (rows, columns // 2), 1),
        "weight_scale": Stored("F8_E4M3", (rows, columns // 16), 1),
        "weight_scale_2": Stored("F32", (), 4, struct.pack("<f", 1.0)),
    }


def _int8(rows: int, columns: int) -> dict[str, Stored]:
    return {"weight": Stored("I8", (rows, columns), 1), "SCB": Stored("F32", (rows,), 4)}


def _torchao(rows: int, columns: int) -> dict[str, Stored]:
    groups = (rows, columns // 32)
    return {
        "_weight_qdata": Stored("I8", (rows, columns), 1),
        "_weight_scale": Stored("F32", groups, 4),
        "_weight_zero_point": Stored("I8", groups, 1),
    }


_TORCHAO_WORD = json.dumps(
    {"_type": "IntxUnpackedToInt8Tensor", "_tensor_data_names": ["qdata", "scale", "zero_point"]}
)


def _squeezellm(rows: int, columns: int) -> dict[str, Stored]:
    return {
        "qweight": Stored("I32", (columns // 8, rows), 4),
        "lookup_table": Stored("F16", (rows, 16), 2),
    }


def _aqlm(rows: int, columns: int) -> dict[str, Stored]:
    return {
        "codes": Stored("I8", (rows, columns // 8, 2), 1),
        "codebooks": Stored("F16", (2, 256, 1, 8), 2),
        "scales": Stored("F16", (rows, 1, 1, 1), 2),
    }


def _compressed(kind: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


QUANTIZED: dict[str, tuple[dict[str, Any], Layer]] = {
    "awq": ({"quant_method": "awq"}, _awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, _gptq),
    "fp8": ({"quant_method": "fp8"}, _by_row("F8_E4M3")),
    "e5m2": ({"quant_method": "fp8"}, _by_row("F8_E5M2")),
    "w8a8": (
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel"), _by_row("I8"),
    ),
    "mxfp4": (
        _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group",
                    group_size=32),
        _mxfp4,
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, _nf4),
    "hqq": ({"quant_method": "hqq", "nbits": 4, "group_size": 64}, _hqq),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, _nvfp4),
    "bnb8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, _int8),
    "torchao": ({"quant_method": "torchao"}, _torchao),
    "squeezellm": ({"quant_method": "squeezellm"}, _squeezellm),
    "aqlm": ({"quant_method": "aqlm"}, _aqlm),
}  # fmt: skip


def write_quantized(folder: Path, method: str) -> Path:
    """The same, its linear layers in one of the formats."""
    write_checkpoint(folder, "bfloat16")
    config, layer = QUANTIZED[method]
    tensors: dict[str, Stored] = {}
    words: dict[str, str] = {}
    for name, shape in shapes().items():
        if "_proj" not in name:
            tensors[name] = Stored("BF16", shape, 2)
            continue
        parts = layer(shape[0], shape[1])
        tensors |= {
            f"{name.removesuffix('weight')}{part}": retained_part
            for part, retained_part in parts.items()
        }
        words |= {name: _TORCHAO_WORD} if method == "torchao" else {}
    _write_kinds(folder / "model.safetensors", tensors, words)
    full_payload = json.loads((folder / "config.json").read_text())
    full_payload["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(full_payload))
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
        num_bytes = math.prod(shape) // values * nbytes
        stored = (*shape[:-1], shape[-1] // values * nbytes)
        writer.add_tensor_info(
            gguf_name(name, "llama"), stored, gguf.np.dtype("uint8"), num_bytes, raw_dtype=of
        )
        size += num_bytes + -num_bytes % writer.data_alignment
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        end = file.tell()
        file.truncate(end + -end % writer.data_alignment + size)
    return path
