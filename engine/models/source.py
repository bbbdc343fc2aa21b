"""Where a model's weights come from."""

from __future__ import annotations

from pathlib import Path

from engine.config import EngineConfig
from engine.device import resolve_device
from engine.models.gguf.folder import source_of
from engine.models.gguf.weights import GGUFWeights
from engine.models.weights import DummyWeights, WeightReader


def open_weights(folder: Path, config: EngineConfig) -> DummyWeights | GGUFWeights | WeightReader:
    """A model folder's weights, opened. Raises `ModelLoadError` for files that aren't sound."""
    if config.load_format == "dummy":
        return DummyWeights(device=resolve_device(config.device))
    file = source_of(folder)
    return WeightReader(folder) if file is None else GGUFWeights(file)
