"""Where a model's weights come from."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.contract.config import EngineConfig
from engine.contract.errors import ModelLoadError
from engine.models.formats import read_npcache, read_pt
from engine.models.gguf.folder import source_of
from engine.models.gguf.weights import GGUFWeights
from engine.models.quantized_weights import QuantizedWeights
from engine.models.sharded_state import read_sharded_state
from engine.models.tensorizer_file import read_tensorizer
from engine.models.weights import DummyWeights, WeightReader
from engine.quantization.checkpoint.format import CheckpointFormat


def open_weights(
    folder: Path,
    config: EngineConfig,
    device: torch.device,
    form: CheckpointFormat | None = None,
) -> DummyWeights | GGUFWeights | WeightReader:
    """A model folder's weights, opened; random ones are made on `device`.

    `form`: how they were quantised; None: they weren't.

    Raises `ModelLoadError` for files that aren't sound.
    """
    if config.load_format == "dummy":
        return DummyWeights(device=str(device))
    file = source_of(folder)
    if file is not None and config.load_format != "auto":
        raise ModelLoadError(
            f"{file} is a GGUF file: leave load_format={config.load_format} out.",
            param="load_format",
        )
    return open_layers(folder, config, form) if file is None else GGUFWeights(file)


def open_layers(folder: Path, config: EngineConfig, form: CheckpointFormat | None) -> WeightReader:
    """The weights of a folder, whatever they are kept in.

    Raises `ModelLoadError` for files that aren't sound.
    """
    weights = open_checkpoint(folder, config)
    return weights if form is None else QuantizedWeights(weights, form)


def open_checkpoint(folder: Path, config: EngineConfig) -> WeightReader:
    """The weights of a folder in the format that `load_format` names.

    Raises `ModelLoadError` for files that aren't sound.
    """
    extra = config.model_loader_extra_config or {}
    if config.load_format == "pt":
        return read_pt(folder)
    if config.load_format == "npcache":
        return read_npcache(folder)
    if config.load_format == "sharded_state":
        return read_sharded_state(folder, extra.get("pattern"))
    if config.load_format == "tensorizer":
        path = folder / extra.get("tensorizer_uri", "model.tensors")
        key, readers = extra.get("encryption_keyfile"), extra.get("num_readers")
        return read_tensorizer(path, folder, key, readers)
    return WeightReader(folder)
