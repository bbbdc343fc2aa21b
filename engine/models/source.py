"""Where a model's weights come from."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.contract.config import EngineConfig
from engine.contract.errors import ModelLoadError
from engine.models.formats import read_npcache, read_pt, read_tensorizer
from engine.models.gguf.folder import source_of
from engine.models.gguf.weights import GGUFWeights
from engine.models.sharded_state import read_sharded_state
from engine.models.weights import DummyWeights, WeightReader


def open_weights(
    folder: Path, config: EngineConfig, device: torch.device
) -> DummyWeights | GGUFWeights | WeightReader:
    """A model folder's weights, opened; random ones are made on `device`.

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
    return open_checkpoint(folder, config) if file is None else GGUFWeights(file)


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
        return read_tensorizer(folder / extra.get("tensorizer_uri", "model.tensors"), folder)
    return WeightReader(folder)
