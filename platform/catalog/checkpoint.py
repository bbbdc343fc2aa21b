"""Reading a checkpoint's facts from `config.json` and the headers of its weights.

Torch-free and fast: a gateway calls it while a user waits for a page.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.contract.hub_files import resolve_source
from engine.text.tokenizer_files import parse_object, read_text

#: Maximum size of a safetensors header, by the format.
MAX_HEADER_BYTES = 100_000_000
MAX_SHARDS = 2000
#: Bits per element by safetensors dtype.
BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16}
BITS |= {"I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
#: Types of layers without a KV cache.
_WITHOUT_KV = ("mamba", "linear_attention", "recurrent", "conv", "mlp", "moe")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*\w", re.ASCII)


def default_name(source: str) -> str:
    """Derive a model's name for clients: the hub id itself, or that of a path."""
    if _HUB_ID.fullmatch(source) and not Path(source).expanduser().exists():
        return source
    return path_name(source)


def path_name(source: str) -> str:
    """Derive a model's name from a folder's or file's last part, with hyphens for what a name can't
    hold.
    """
    name = resolve_source(Path(source).expanduser()).name
    return re.sub(r"[^A-Za-z0-9._:@-]+", "-", name).strip("._:@-") or "model"


@dataclass(frozen=True)
class KvShape:
    """Shape of a decoder's KV cache.

    Attributes:
        layers: number of layers with a KV cache.
        windows: each of these layers' sliding window in tokens, 0 for all.
        context: the checkpoint's maximum length, 0 if unknown.
    """

    layers: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    context: int

    @property
    def values_per_token(self) -> int:
        """KV cache elements per token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Checkpoint:
    """Facts about a model that are known without loading it.

    Attributes:
        format: "safetensors" or "GGUF".
        parameters: number of stored weight elements; packed ones count as stored.
        nbytes: of the weights. dtypes: bytes by dtype.
        matrix_values, table_values: floats in matrices that `--quantization` quantizes: of layers,
            and of the embedding and the output layer.
        expert_nbytes: of the experts of all layers.
        dtype: the most common float dtype, "" without floats.
        quantization: its method ("awq", "gptq" ...), "" for unquantized weights.
        shape: None if config.json doesn't define it.
    """

    architecture: str
    format: str
    nbytes: int
    files: int
    parameters: int = 0
    dtypes: Mapping[str, int] = field(default_factory=dict)
    matrix_values: int = 0
    table_values: int = 0
    expert_nbytes: int = 0
    dtype: str = ""
    quantization: str = ""
    shape: KvShape | None = None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a model folder or a GGUF file. Raises `InvalidRequest` (`source`) for anything else."""
    try:
        if gguf := _gguf_files(folder):
            size = sum(path.stat().st_size for path in gguf)
            return Checkpoint("", "GGUF", size, len(gguf), quantization="gguf")
        config = parse_object(read_text(folder / "config.json"), folder / "config.json")
        return _of_safetensors(folder, config)
    except (ModelLoadError, OSError) as error:
        reason = error.message if isinstance(error, ModelLoadError) else str(error)
        raise InvalidRequest(reason, param="source") from error


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first architecture in config.json."""
    names = config.get("architectures")
    return str(names[0])[:200] if isinstance(names, list) and names else ""


def quantization_of(config: Mapping[str, Any]) -> str:
    """The checkpoint's quantization method, from config.json."""
    quantization = config.get("quantization_config") or config.get("compression_config") or {}
    return str(quantization.get("quant_method", ""))[:40] if isinstance(quantization, dict) else ""


def shape_of(config: Mapping[str, Any]) -> KvShape | None:
    """The KV cache's shape, for the model families that the native decoder runs."""
    text = config.get("text_config")
    merged = {**config, **text} if isinstance(text, dict) else dict(config)
    try:
        layers = _config_int(merged, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
        heads = _config_int(merged, "num_attention_heads", "n_head", "n_heads", "num_heads")
        hidden = _config_int(merged, "hidden_size", "n_embd", "d_model")
        kv_heads = _config_int(merged, "num_key_value_heads", "num_kv_heads", default=heads)
        if merged.get("multi_query") and not merged.get("new_decoder_architecture"):
            kv_heads = 1
        head_dim = _config_int(
            merged, "attention_head_dim", "head_dim", "kv_channels", default=hidden // heads
        )
        context = _config_int(
            merged, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", default=0
        )
        attending = _attention_layers(merged, layers)
        windows = tuple(compress(_windows(merged, layers), attending))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    if not windows:
        return None
    return KvShape(len(windows), kv_heads, head_dim, windows, context)


def _attention_layers(config: Mapping[str, Any], layers: int) -> list[bool]:
    """Whether each layer has a KV cache; others have a recurrent state, or are an MLP alone."""
    types = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(types, list) and len(types) == layers:
        return [kind not in _WITHOUT_KV for kind in types]
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and len(pattern) == layers:
        return [kind == "*" for kind in pattern]
    period, offset = config.get("attn_layer_period"), config.get("attn_layer_offset")
    if isinstance(period, int) and isinstance(offset, int) and period > 0:
        return [layer % period == offset for layer in range(layers)]
    every = config.get("full_attention_interval")
    if isinstance(every, int) and every > 0:
        return [(layer + 1) % every == 0 for layer in range(layers)]
    return [True] * layers


def _config_int(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31:
            return value
    if default is None:
        raise KeyError(names[0])
    return default


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    window = config.get("sliding_window")
    full = (0,) * layers
    if not isinstance(window, int) or window <= 0 or config.get("use_sliding_window") is False:
        return full
    types = config.get("layer_types")
    if isinstance(types, list) and len(types) == layers:
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    if config.get("use_sliding_window"):
        first = int(config.get("max_window_layers", layers))
        return tuple(window if layer >= first else 0 for layer in range(layers))
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 0:
        return tuple(0 if (layer + 1) % pattern == 0 else window for layer in range(layers))
    return (window,) * layers


def _gguf_files(path: Path) -> list[Path]:
    if path.suffix == ".gguf" and path.is_file():
        first, separator, _ = path.name.partition("-00001-of-")
        return sorted(path.parent.glob(f"{first}-*-of-*.gguf")) if separator else [path]
    if (path / "config.json").exists():
        return []
    return sorted(path.glob("*.gguf"))


def _of_safetensors(folder: Path, config: dict[str, Any]) -> Checkpoint:
    paths = _shards(folder)
    return checkpoint_from_headers(
        config, (item for path in paths for item in _tensors(path)), len(paths)
    )


def checkpoint_from_headers(
    config: Mapping[str, Any], tensors: Iterable[tuple[str, Mapping[str, Any]]], num_files: int
) -> Checkpoint:
    """Build it from safetensors headers: names with `dtype`, `shape`, `data_offsets`."""
    dtypes: Counter[str] = Counter()
    values = tables = matrices = experts = 0
    for name, entry in tensors:
        count, dtype = math.prod(entry["shape"]), str(entry["dtype"])
        first, last = entry["data_offsets"]
        dtypes[dtype] += last - first
        values += count
        experts += (last - first) * (".experts." in name)
        if dtype in FLOATS and len(entry["shape"]) > 1:
            table = any(word in name for word in ("embed", "wte", "lm_head", "output."))
            tables, matrices = tables + count * table, matrices + count * (not table)
    floats = [(size, name) for name, size in dtypes.items() if name in FLOATS]
    return Checkpoint(
        architecture_of(config),
        "safetensors",
        sum(dtypes.values()),
        num_files,
        parameters=values,
        dtypes=dict(dtypes.most_common()),
        matrix_values=matrices,
        table_values=tables,
        expert_nbytes=experts,
        dtype=max(floats)[1] if floats else "",
        quantization=quantization_of(config),
        shape=shape_of(config),
    )


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        paths = [folder / "model.safetensors"]
    else:
        paths = [folder / name for name in shard_names(parse_object(read_text(index), index))]
    existing = [path for path in paths[:MAX_SHARDS] if path.is_file()]
    if not existing or len(existing) < len(paths):
        raise InvalidRequest(f"No .safetensors files found in {folder}.", param="source")
    return existing


def shard_names(index: Mapping[str, Any]) -> list[str]:
    """The files listed in `model.safetensors.index.json`."""
    mapping = index.get("weight_map")
    names = {str(name) for name in mapping.values()} if isinstance(mapping, dict) else set()
    # Ignore names that lead out of the folder.
    return [name for name in sorted(names) if Path(name).name == name]


def _tensors(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and header of each tensor. Raises `InvalidRequest` for an invalid header."""
    invalid = InvalidRequest(f"{path} isn't a valid safetensors file.", param="source")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, size):
            raise invalid
        try:
            header = json.loads(file.read(length))
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                first, last = entry["data_offsets"]
                sound = all(isinstance(n, int) and n >= 0 for n in (*entry["shape"], first, last))
                if not sound or not first <= last <= size or entry["dtype"] not in BITS:
                    raise invalid
                yield name, entry
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise invalid from error
