"""Writes checkpoints whose linear layers are quantized to 8 or 4 bits, as compressed-tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoints.gguf.folder import find_gguf
from engine.checkpoints.load_format import open_checkpoint
from engine.checkpoints.safetensors import INDEX_NAME, WeightReader
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import InvalidRequest
from engine.model_loader.loader import resolve_folder
from engine.model_loader.model_impl import resolve_quantization
from engine.models.decoder import NativeDecoder
from engine.models.decoder_spec import DecoderSpec
from engine.models.interface import EngineModel
from engine.models.layers.describe import describe
from engine.models.layers.linear import ModelDescription, MoeBlock, described_linears
from engine.models.registry import read_config
from engine.quantization.formats.matrices import kernel_group_size
from kernels.linear_factory import group_size_for
from kernels.reference.linear import quantize

BITS = {"int8": 8, "int4": 4}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".tensors", ".index.json")
#: Size in bytes at which a file is finished; it may exceed this by one layer.
_FILE_BYTES = 2 << 30
#: Number of values that are rounded at once.
_CHUNK_VALUES = 1 << 20
#: Number of 4-bit integers in a word.
_IN_A_WORD = 8


def save_quantized(config: EngineConfig, model: EngineModel, path: str | Path) -> list[Path]:
    """Write a loaded model as compressed-tensors to a new folder; returns the files of weights.

    See `write_quantized`. Raises `InvalidRequest` for what can't be saved like that.
    """
    quantization = config.quantization
    if quantization not in BITS or not isinstance(model, NativeDecoder):
        raise InvalidRequest(
            "save_quantized is for models that Quire runs natively, loaded with "
            "quantization='int8' or 'int4'.",
            param="quantization",
        )
    folder = resolve_folder(config)
    form = resolve_quantization(folder, read_config(folder), config).form
    if find_gguf(Path(config.model)) or form is not None:
        raise InvalidRequest(
            f"{config.model} is quantized already: copy it as it is.", param="path"
        )
    weights = open_checkpoint(folder, config)
    return write_quantized(weights, model.spec, folder, Path(path), quantization)


def write_quantized(
    weights: WeightReader, spec: DecoderSpec, source: Path, target: Path, quantization: str
) -> list[Path]:
    """Write a folder whose linear layers are in the bits of `quantization`: its files of weights.

    "int4": what Quire rounds them to at load, with a scale for 32 neighbours. "int8": with a scale
    for each row, where Quire's own has one for 128 neighbours: the 8 bits that every build of vLLM
    reads. Tables, routers and norms stay as they are, as do layers whose rows aren't whole groups
    (of 32; of 16 for int8). A few files' worth of memory is needed beside the checkpoint.

    Raises `InvalidRequest` if the folder exists, and for a family whose checkpoints store weights
    transposed.
    """
    if spec.transposed:
        raise InvalidRequest(
            f"{spec.architecture} keeps its weights as [inputs, outputs], which compressed-tensors "
            "has no form for.",
            param="path",
        )
    if target.exists():
        raise InvalidRequest(f"{target} is there already.", param="path")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        files = _write(weights, spec, source, partial, quantization)
        partial.rename(target)
    except OSError as error:
        raise InvalidRequest(f"{target} can't be written: {error}", param="path") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [target / file.name for file in files]


def _write(
    weights: WeightReader, spec: DecoderSpec, source: Path, folder: Path, quantization: str
) -> list[Path]:
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, folder / path.name)
    rounded = _quantized_names(weights, spec, quantization)
    write = _per_channel if quantization == "int8" else _by_groups
    parts = _Files(folder)
    for name in sorted(weights.names()):
        tensor = weights.stored(name)
        if name in rounded:
            parts.add(write(name.removesuffix(".weight"), tensor))
        else:
            parts.add({name: tensor.clone()})
        weights.release()
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    ignored = sorted(
        name.removesuffix(".weight")
        for name in weights.names()
        if name.endswith(".weight") and name not in rounded and len(weights.stored_shape(name)) == 2
    )
    config["quantization_config"] = _config(quantization, ignored)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return parts.finish()


class _Files:
    """Collects tensors into weight files and their index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._part: dict[str, Tensor] = {}
        self._size = self._total = 0
        self._files: list[list[str]] = []

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Collect tensors, and write a file when there are enough."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._part and self._size + size > _FILE_BYTES:
            self._flush()
        self._part |= tensors
        self._size += size

    def _flush(self) -> None:
        path = self._folder / f"part-{len(self._files)}"
        save_file(self._part, path, metadata={"format": "pt"})
        self._files.append(list(self._part))
        self._total += self._size
        self._part, self._size = {}, 0

    def finish(self) -> list[Path]:
        """Write the remaining tensors and the index, and return the files."""
        self._flush()
        count = len(self._files)
        names = [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
        for number, name in enumerate(names):
            (self._folder / f"part-{number}").rename(self._folder / name)
        pairs = zip(names, self._files, strict=True)
        index = {tensor: name for name, tensors in pairs for tensor in tensors}
        content = {"metadata": {"total_size": self._total}, "weight_map": index}
        (self._folder / INDEX_NAME).write_text(json.dumps(content), encoding="utf-8")
        return [self._folder / name for name in names]


def _quantized_names(weights: WeightReader, spec: DecoderSpec, quantization: str) -> set[str]:
    """Return the names of linear weights whose rows consist of complete groups."""
    linear_names = {f"{name}.weight" for name in _linear_names(describe(spec), spec)}
    bare = {name.removeprefix(spec.names.optional_prefix) for name in linear_names}
    return {
        name
        for name in weights.names()
        if name in linear_names | bare
        and _has_full_groups(weights.stored_shape(name)[-1], quantization)
    }


def _has_full_groups(width: int, quantization: str) -> bool:
    """Whether rows of this many values consist of complete groups."""
    if quantization == "int8":
        return kernel_group_size(width, width) is not None
    return width % group_size_for(quantization, None) == 0


def _linear_names(model: ModelDescription, spec: DecoderSpec) -> Iterator[str]:
    for layer in model.layers:
        for linear in described_linears(layer):
            if linear.quantized:
                yield from (part.name for part in linear.parts)
        experts = layer.mlp
        if isinstance(experts, MoeBlock) and experts.moe.layout == "split":
            prefix = f"{experts.layer}{experts.moe.experts}"
            for number in range(experts.moe.num_experts):
                yield from (f"{prefix}{number}.{name}" for name in experts.moe.expert_names)


def _per_channel(module: str, weight: Tensor) -> dict[str, Tensor]:
    """compressed-tensors' tensors of a weight [N, K] in 8 bits with a scale per row."""
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty((len(weight), 1), dtype=torch.float16)
    for rows in _row_slices(weight):
        quantized = quantize(weight[rows], "int8", weight.shape[1])
        values[rows], scales[rows] = quantized[0], quantized[1].half()
    return {f"{module}.weight": values, f"{module}.weight_scale": scales}


def _by_groups(module: str, weight: Tensor) -> dict[str, Tensor]:
    """compressed-tensors' tensors of a weight [N, K] in 4 bits, eight per word."""
    group = group_size_for("int4", None)
    rows, columns = weight.shape
    words = torch.empty((rows, columns // _IN_A_WORD), dtype=torch.int32)
    scales = torch.empty((rows, columns // group), dtype=torch.float16)
    for row_slice in _row_slices(weight):
        values, group_scales = quantize(weight[row_slice], "int4", group)
        grouped = values.long().view(len(values), -1, _IN_A_WORD)
        shifted = grouped << (torch.arange(_IN_A_WORD) * BITS["int4"])
        words[row_slice] = shifted.sum(-1).to(
            torch.int32
        )  # the high bit of the last integer becomes the sign
        scales[row_slice] = group_scales.half()
    return {
        f"{module}.weight_packed": words,
        f"{module}.weight_scale": scales,
        f"{module}.weight_shape": torch.tensor([rows, columns]),
    }


def _row_slices(weight: Tensor) -> Iterator[slice]:
    """Rows that are rounded together."""
    step = max(1, _CHUNK_VALUES // weight.shape[1])
    for start in range(0, len(weight), step):
        yield slice(start, start + step)


def _config(quantization: str, ignored: list[str]) -> dict[str, Any]:
    weight_config: dict[str, Any] = {
        "num_bits": BITS[quantization],
        "type": "int",
        "symmetric": True,
    }
    inputs = None
    if quantization == "int8":
        weights = {**weight_config, "strategy": "channel", "dynamic": False}
        inputs = {**weight_config, "strategy": "token", "dynamic": True}
    else:
        group = group_size_for(quantization, None)
        weights = {**weight_config, "strategy": "group", "group_size": group, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if quantization == "int8" else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ignored,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
            }
        },
    }
